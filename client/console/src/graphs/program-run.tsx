import { useState } from "preact/hooks";
import { call } from "../api/client";
import { useLoad } from "../api/load";
import { ErrorBox, Loading } from "../ui/states";
import { evaluateProgram } from "./api";
import { FeedEditor } from "./feed-editor";
import type { Feed } from "./feeds";
import { type ColumnResult, Results } from "./results-view";
import type { Program } from "./types";
import { valuesByName, valuesOf } from "./workspace";

/** Runs a stored program. The server does not return graphs, so it is not drawn. */
export function ProgramRun({ name }: { name: string }) {
  const id = name.replace("programs/", "");
  const loaded = useLoad(
    (signal) => call<{ program: Program }>("GET", `v1/programs/${encodeURIComponent(id)}`, { signal }),
    [name],
  );
  const [feeds, setFeeds] = useState<Record<string, Feed>>({});
  const [results, setResults] = useState<ColumnResult[]>();
  const [error, setError] = useState<unknown>();
  const program = loaded.answer?.program;
  if (loaded.error !== undefined) return <ErrorBox error={loaded.error} retry={loaded.reload} />;
  if (!program) return <Loading what="the program" />;
  const inputs = program.inputs ?? [];
  const run = () => {
    setError(undefined);
    Promise.resolve()
      .then(() => evaluateProgram(name, valuesOf(inputs, feeds)))
      .then((answer) => setResults([{ title: id, values: valuesByName(answer) }]))
      .catch((problem: unknown) => setError(problem));
  };
  return (
    <>
      <section class="card stack" aria-label="Run">
        <p class="muted">
          The server does not return the graphs of programs. To draw this one, load its file. Nodes with an override:{" "}
          {program.overrides?.length ?? 0}.
        </p>
        <FeedEditor inputs={inputs} feeds={feeds} onChange={setFeeds} />
        <p>
          <button class="button button-primary" type="button" onClick={run}>
            Run
          </button>
        </p>
        {error !== undefined && <ErrorBox error={error} />}
      </section>
      {results && <Results results={results} />}
    </>
  );
}
