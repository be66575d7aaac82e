import { useState } from "preact/hooks";
import type { Route } from "../router";
import type { LoadedGraph } from "./api";
import type { Example } from "./examples";
import { ProgramRun } from "./program-run";
import { Source } from "./source";
import { Workspace } from "./workspace";
import "./graphs.css";

interface Chosen {
  graph?: LoadedGraph;
  example?: Example | undefined;
  program?: string;
}

/** The page of graphs: load a graph, set overrides, see the rule of each node, run, compare rules. */
export function GraphsPage({ route }: { route: Route }) {
  const asked = route.query.get("program");
  const [chosen, setChosen] = useState<Chosen>(asked ? { program: asked } : {});
  const title = chosen.graph?.name ?? chosen.program?.replace("programs/", "");
  return (
    <>
      <div class="page-head">
        <div>
          <h1>{title ?? "Graphs"}</h1>
          {chosen.graph && (
            <p class="muted">
              {chosen.graph.facts.nodes.length} nodes, {Math.max(1, Math.round(chosen.graph.facts.size / 1024))} KiB
            </p>
          )}
          {!title && (
            <p class="muted">
              Draw a graph with its overrides, see which node gets which rule and why, run it, and compare rules.
            </p>
          )}
        </div>
        {title && (
          <button class="button" type="button" onClick={() => setChosen({})}>
            Another graph
          </button>
        )}
      </div>
      {chosen.graph ? (
        <Workspace graph={chosen.graph} example={chosen.example} />
      ) : chosen.program ? (
        <ProgramRun name={chosen.program} />
      ) : (
        <Source
          onGraph={(graph, example) => setChosen({ graph, example })}
          onProgram={(program) => setChosen({ program })}
        />
      )}
    </>
  );
}
