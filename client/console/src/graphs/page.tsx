import { useBearerToken } from "../api/token";
import { go, href, type Route } from "../router";
import { useChosen } from "./kept";
import { ProgramRun } from "./program-run";
import { Source } from "./source";
import { Workspace } from "./workspace";
import "./graphs.css";

/** The page of graphs: load a graph, set overrides, see the rule of each node, run, compare rules. */
export function GraphsPage({ route }: { route: Route }) {
  const program = route.query.get("program")?.replace("programs/", "");
  const token = useBearerToken();
  const [chosen, choose] = useChosen();
  // Who signs out leaves nothing on the page.
  const graph = !program && chosen?.token === token ? chosen.graph : undefined;
  const title = graph?.name ?? program;
  return (
    <>
      <div class="page-head">
        <div>
          <h1>{title ?? "Graphs"}</h1>
          {graph && (
            <p class="muted">
              {graph.facts.nodeCount} nodes, {Math.max(1, Math.round(graph.facts.size / 1024))} KiB
            </p>
          )}
          {!title && (
            <p class="muted">
              Draw a graph with its overrides, see which node gets which rule and why, run it, and compare rules.
            </p>
          )}
        </div>
        {title && (
          <button
            class="button"
            type="button"
            onClick={() => {
              choose(undefined);
              if (program) go(href("graphs"));
            }}
          >
            Another graph
          </button>
        )}
      </div>
      {graph ? (
        <Workspace key={graph.facts.sha256} graph={graph} example={chosen?.example} />
      ) : program ? (
        <ProgramRun key={program} name={`programs/${program}`} />
      ) : (
        <Source
          onGraph={(graph, example) => choose({ graph, example, token })}
          onProgram={(name) => go(`${href("graphs")}?${new URLSearchParams({ program: name })}`)}
        />
      )}
    </>
  );
}
