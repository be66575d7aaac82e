import { useEffect, useState } from "preact/hooks";
import { isAbort } from "../api/client";
import { ErrorBox, Loading, problemOf } from "../ui/states";
import { Table } from "../ui/table";
import { evaluate, explain, storeProgram, type LoadedGraph } from "./api";
import type { Example } from "./examples";
import { FeedEditor } from "./feed-editor";
import { type Feed, feedValue, initialFeed } from "./feeds";
import { Picture } from "./picture";
import { useKept } from "./kept";
import { toValue, type Value } from "./results";
import { type ColumnResult, Results } from "./results-view";
import { columns, type ComparedRule, initialForm, programSpec, type SpecForm } from "./spec";
import { SpecEditor } from "./spec-editor";
import type { EvaluateAnswer, Finding, PictureAnswer, Resolution, TensorSpec } from "./types";

const PAUSE_MS = 350;

/** Works with one graph: overrides, picture, values, results. */
export function Workspace({ graph, example }: { graph: LoadedGraph; example?: Example | undefined }) {
  const [form, setForm] = useKept<SpecForm>(graph, "form", () => example?.form ?? initialForm(graph.facts));
  const [picture, setPicture] = useKept<PictureAnswer | undefined>(graph, "picture", () => undefined);
  const [error, setError] = useState<unknown>();
  const [loading, setLoading] = useState(true);
  const [node, setNode] = useState<{ name: string }>();
  const wanted = JSON.stringify(form);
  useEffect(() => {
    const cancel = new AbortController();
    setLoading(true);
    const timer = setTimeout(
      () => {
        Promise.resolve()
          .then(() => explain(graph, programSpec(graph.facts, form), cancel.signal))
          .then((answer) => {
            setPicture(answer);
            setError(undefined);
          })
          .catch((problem: unknown) => isAbort(problem) || setError(problem))
          .finally(() => cancel.signal.aborted || setLoading(false));
      },
      picture ? PAUSE_MS : 0,
    );
    return () => {
      clearTimeout(timer);
      cancel.abort();
    };
  }, [graph, wanted]);
  const program = picture?.answer.program;
  return (
    <>
      <section class="card stack" aria-label="Program">
        <SpecEditor facts={graph.facts} form={form} onChange={setForm} />
      </section>
      {error !== undefined && <ErrorBox error={error} />}
      <Findings findings={picture?.answer.findings ?? []} show={(name) => setNode({ name })} />
      <section class="graph-frame" aria-label="Graph" aria-busy={loading}>
        {picture ? (
          <Picture graph={picture.picture} node={node} />
        ) : (
          error === undefined && <Loading what="the graph" lines={8} />
        )}
      </section>
      {program && <Resolutions found={program.overrides ?? []} show={(name) => setNode({ name })} />}
      <Run
        graph={graph}
        form={form}
        example={example}
        inputs={program?.inputs ?? graph.facts.inputs}
        ready={Boolean(program) && !loading}
      />
    </>
  );
}

function Findings({ findings, show }: { findings: Finding[]; show: (node: string) => void }) {
  if (!findings.length) return null;
  return (
    <div class="notice notice-error" role="alert">
      <p class="notice-title">{findings.length === 1 ? "One problem" : `${findings.length} problems`}</p>
      <ul class="notice-text">
        {findings.map(({ reason, message, node }) => (
          <li>
            <code class="tag">{reason?.replace("ERROR_REASON_", "")}</code> {message}{" "}
            {node && (
              <button class="button button-small" type="button" onClick={() => show(node)}>
                Show {node}
              </button>
            )}
          </li>
        ))}
      </ul>
    </div>
  );
}

function Resolutions({ found, show }: { found: Resolution[]; show: (node: string) => void }) {
  if (!found.length) return null;
  return (
    <details class="card">
      <summary>
        <b>Rule of each node</b>{" "}
        <span class="muted">{found.length === 1 ? "1 node" : `${found.length} nodes`} with an override</span>
      </summary>
      <Table label="Table of the rule of each node" columns={["Node", "Op", "Rule", "Override", "Status"]}>
        {found.slice(0, 500).map(({ node, opType, rule, label, status }) => (
          <tr>
            <td>
              <button class="button button-small" type="button" onClick={() => show(node)}>
                {node}
              </button>
            </td>
            <td>{opType}</td>
            <td>{rule}</td>
            <td>{label}</td>
            <td>{status?.replace("RESOLUTION_STATUS_", "").toLowerCase().replace("_", " ")}</td>
          </tr>
        ))}
      </Table>
    </details>
  );
}

/** Results, and the settings that they are of. */
interface Ran {
  results: ColumnResult[];
  settings: string;
  feeds: Record<string, Feed>;
}

interface RunProps {
  graph: LoadedGraph;
  form: SpecForm;
  example: Example | undefined;
  inputs: TensorSpec[];
  ready: boolean;
}

function Run({ graph, form, example, inputs, ready }: RunProps) {
  const [feeds, setFeeds] = useKept<Record<string, Feed>>(graph, "feeds", () => {
    const known = example?.feeds() ?? {};
    return Object.fromEntries(inputs.map((spec) => [spec.name, { ...initialFeed(spec), ...known[spec.name] }]));
  });
  const [rules, setRules] = useKept<ComparedRule[]>(graph, "rules", () => [
    { rule: example?.rules[0] ?? "", params: "" },
    { rule: "", params: "" },
  ]);
  const [plain, setPlain] = useKept(graph, "plain", () => true);
  const [ran, setRan] = useKept<Ran | undefined>(graph, "ran", () => undefined);
  const settings = JSON.stringify([form, rules, plain]);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>();
  const [stored, setStored] = useState("");
  const run = async () => {
    setBusy(true);
    setError(undefined);
    try {
      const values = valuesOf(inputs, feeds);
      const asked = columns(form, rules, plain).map(({ title, form }) => ({
        title,
        spec: programSpec(graph.facts, form),
      }));
      const results = await Promise.all(
        asked.map(({ title, spec }) =>
          evaluate(graph, spec, values).then(
            (answer) => ({ title, values: valuesByName(answer) }),
            (problem: unknown) => ({ title, values: new Map(), error: problemOf(problem).detail }),
          ),
        ),
      );
      setRan({ results, settings, feeds });
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  useEffect(() => {
    // An example shows a result at once.
    if (example && ready && !ran && !busy) void run();
  }, [ready]);
  return (
    <>
      <section class="card stack" aria-label="Run">
        <h2>Values and rules to compare</h2>
        <FeedEditor inputs={inputs} feeds={feeds} onChange={setFeeds} />
        <div class="graph-compare">
          {rules.map(({ rule, params }, index) => {
            const change = (part: Partial<ComparedRule>) =>
              setRules((before) => before.map((each, at) => (at === index ? { ...each, ...part } : each)));
            return (
              <div class="graph-compared">
                <label class="field">
                  <span>{index ? "And with rule" : "Compare with rule"}</span>
                  <input
                    class="input input-code"
                    list="graph-rules"
                    placeholder="none"
                    value={rule}
                    onInput={(event) => change({ rule: event.currentTarget.value })}
                  />
                </label>
                <label class="field">
                  <span>Its params</span>
                  <input
                    class="input input-code"
                    placeholder="clip=1"
                    value={params}
                    onInput={(event) => change({ params: event.currentTarget.value })}
                  />
                </label>
              </div>
            );
          })}
          <label class="graph-inline">
            <input type="checkbox" checked={plain} onChange={(event) => setPlain(event.currentTarget.checked)} /> and
            without overrides
          </label>
        </div>
        <p class="row">
          <button class="button button-primary" type="button" disabled={busy || !ready} onClick={() => void run()}>
            {busy ? "Running …" : "Run"}
          </button>
          <button
            class="button"
            type="button"
            disabled={busy || !ready}
            onClick={() => {
              storeProgram(graph, programSpec(graph.facts, form)).then(setStored, setError);
            }}
          >
            Store as program
          </button>
          {stored && (
            <span role="status">
              Stored as <code>{stored}</code>
            </span>
          )}
        </p>
        {error !== undefined && <ErrorBox error={error} />}
      </section>
      {ran && <Results results={ran.results} outdated={ran.settings !== settings || ran.feeds !== feeds} />}
    </>
  );
}

/** Returns the values to send. Throws FeedError. */
export function valuesOf(inputs: TensorSpec[], feeds: Record<string, Feed>) {
  return Object.fromEntries(inputs.map((spec) => [spec.name, feedValue(spec, feeds[spec.name] ?? initialFeed(spec))]));
}

/** Returns outputs and gradients by a title. */
export function valuesByName(answer: EvaluateAnswer): Map<string, Value> {
  return new Map([
    ...Object.entries(answer.outputs ?? {}).map(([name, tensor]) => [`Output ${name}`, toValue(tensor)] as const),
    ...Object.entries(answer.gradients ?? {}).map(
      ([name, gradient]) => [`Gradient of ${name}`, toValue(gradient)] as const,
    ),
  ]);
}
