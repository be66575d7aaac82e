import { useEffect, useState } from "preact/hooks";
import { useLoad } from "../api/load";
import { ErrorBox } from "../ui/states";
import { programNames, uploadGraph, type LoadedGraph } from "./api";
import { EXAMPLES, type Example } from "./examples";

export interface SourceProps {
  onGraph: (graph: LoadedGraph, example?: Example) => void;
  onProgram: (name: string) => void;
}

/** Asks for a graph: a file, pasted text, an example, or a stored program. */
export function Source({ onGraph, onProgram }: SourceProps) {
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>();
  const programs = useLoad(programNames, []);
  const upload = (name: string, data: Blob, example?: Example) => {
    setBusy(true);
    setError(undefined);
    uploadGraph(name, data)
      .then((graph) => onGraph(graph, example))
      .catch((problem: unknown) => setError(problem))
      .finally(() => setBusy(false));
  };
  useDrop((file) => upload(file.name, file));
  return (
    <div class="stack">
      <section class="card stack" aria-label="Examples">
        <h2>Start with an example</h2>
        <div class="graph-examples">
          {EXAMPLES.map((example) => (
            <button
              type="button"
              class="graph-example"
              disabled={busy}
              onClick={() => upload(example.title, new Blob([JSON.stringify(example.graph())]), example)}
            >
              <b>{example.title}</b>
              <span class="muted small">{example.text}</span>
            </button>
          ))}
        </div>
      </section>
      {error !== undefined && <ErrorBox error={error} />}
      <div class="columns">
        <section class="card stack" aria-label="Your graph">
          <h2>Use your graph</h2>
          <p class="muted">
            A TensorFlow GraphDef: <code>.pb</code>, <code>.pbtxt</code> or <code>.json</code>; or an ONNX model:{" "}
            <code>.onnx</code>. Choose a file, drop it on this page, or paste text. In Python,{" "}
            <code>graph.save("graph.pb")</code> writes such a file.
          </p>
          <label class="field">
            <span>File</span>
            <input
              class="input"
              type="file"
              accept=".pb,.onnx,.pbtxt,.json,.txt"
              disabled={busy}
              onChange={(event) => {
                const file = event.currentTarget.files?.[0];
                if (file) upload(file.name, file);
              }}
            />
          </label>
          <label class="field">
            <span>Text or JSON</span>
            <textarea
              class="input input-code"
              rows={6}
              value={text}
              placeholder={'node { name: "x" op: "Placeholder" … }'}
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </label>
          <p class="row">
            <button
              class="button button-primary"
              type="button"
              disabled={busy || !text.trim()}
              onClick={() => upload("pasted graph", new Blob([text]))}
            >
              Load text
            </button>
            {busy && <span role="status">Uploading …</span>}
          </p>
        </section>
        <section class="card stack" aria-label="Stored programs">
          <h2>Run a stored program</h2>
          {programs.error !== undefined && <ErrorBox error={programs.error} retry={programs.reload} />}
          {programs.answer?.length === 0 && <p class="muted">The server stores no programs yet.</p>}
          <ProgramList names={programs.answer ?? []} onProgram={onProgram} />
        </section>
      </div>
    </div>
  );
}

const MAX_PROGRAMS = 50;

/** Shows the first programs, and a search if there are more. */
function ProgramList({ names, onProgram }: { names: string[]; onProgram: (name: string) => void }) {
  const [search, setSearch] = useState("");
  const ids = names.map((name) => name.replace("programs/", ""));
  const found = ids.filter((id) => id.toLowerCase().includes(search.trim().toLowerCase()));
  return (
    <>
      {names.length > MAX_PROGRAMS && (
        <input
          class="input"
          type="search"
          placeholder="Find a program"
          aria-label="Find a program"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
      )}
      <ul class="graph-programs">
        {found.slice(0, MAX_PROGRAMS).map((id) => (
          <li key={id}>
            <button class="button button-small" type="button" onClick={() => onProgram(id)}>
              {id}
            </button>
          </li>
        ))}
      </ul>
      {names.length > MAX_PROGRAMS && (
        <p class="muted small" role="status">
          {found.length > MAX_PROGRAMS
            ? `The first ${MAX_PROGRAMS} of ${found.length}: search for others.`
            : `${found.length} of ${names.length} programs`}
        </p>
      )}
    </>
  );
}

/** Takes files that are dropped on the page. */
function useDrop(take: (file: File) => void): void {
  useEffect(() => {
    const over = (event: DragEvent) => event.preventDefault();
    const drop = (event: DragEvent) => {
      event.preventDefault();
      const file = event.dataTransfer?.files[0];
      if (file) take(file);
    };
    document.addEventListener("dragover", over);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("dragover", over);
      document.removeEventListener("drop", drop);
    };
  });
}
