import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError } from "../api/client";
import { go, href, type Route } from "../router";
import { CodeBlock } from "../ui/copy";
import { CreateRule } from "./create-rule";
import { ExpressionField, type ExpressionError } from "./expression-field";
import { NumberField } from "./number-field";
import { definitionOf, readState, stateLink, type PlaygroundState } from "./playground-state";
import { snippetsOfDefinition } from "./rule-text";
import type { Target } from "./sampling";
import { setupOfOp, SETUPS, STEP, usesOnlyDy } from "./setups";
import { CheckCard, CurveCard, SpecialCard, useStudy } from "./study";

const OPS = Object.keys(SETUPS).filter((name) => name !== "@activation" && name !== STEP);

/** Page where somebody writes a rule and sees its curve at once. */
export function Playground({ route }: { route: Route }) {
  const [state, setState] = useState(() => readState(route.query));
  const [range, setRange] = useState<{ low: number; high: number }>();
  const link = stateLink(state);
  useEffect(() => go(link, { replace: true }), [link]);
  const change = (part: Partial<PlaygroundState>) => setState((before) => ({ ...before, ...part }));
  const changeParam = (index: number, part: Partial<{ name: string; value: number }>) =>
    change({ params: state.params.map((param, at) => (at === index ? { ...param, ...part } : param)) });

  const definition = useMemo(() => definitionOf(state), [link]);
  const target = useMemo(() => targetOf(state, range), [link, range]);
  const study = useStudy(target, undefined, link + JSON.stringify(range ?? ""));
  const expressionError = errorOf(study.error);
  const missing = expressionError?.message.match(/^unknown name '([A-Za-z_]\w*)'/)?.[1];
  const isOther = state.opType !== "" && !(state.opType in SETUPS);
  const others = target?.setup.others ?? [];
  const changeOther = (index: number, value: number) =>
    change({ others: others.map((other, at) => (at === index ? value : other)) });
  const snippets = snippetsOfDefinition(definition, state.opType);
  return (
    <>
      <nav aria-label="Breadcrumb" class="small">
        <a href={href("rules")}>Rules</a>
      </nav>
      <div class="page-head">
        <div>
          <h1>Playground</h1>
          <p class="muted">Type a rule. The server runs it as you type; nothing is stored.</p>
        </div>
        <CreateRule definition={definition} disabled={study.error !== undefined || study.busy || !target} />
      </div>
      <section class="card stack" aria-label="Rule">
        <ExpressionField
          value={state.expression}
          error={expressionError}
          onChange={(expression) => change({ expression })}
        />
        <div class="playground-form">
          <div class="playground-inputs">
            <label class="field">
              <span>Op</span>
              <select
                class="select"
                value={isOther ? "other" : state.opType}
                onChange={(event) => {
                  change({ opType: event.currentTarget.value, others: [] });
                  setRange(undefined);
                }}
              >
                <option value="">None</option>
                <option value={STEP}>Step: x &gt; 0</option>
                {OPS.map((name) => (
                  <option value={name}>{name}</option>
                ))}
                {isOther && <option value="other">{state.opType}</option>}
              </select>
            </label>
            <NumberField
              label="x from"
              value={target?.setup.low ?? -3}
              onChange={(low) => setRange({ low, high: target?.setup.high ?? 3 })}
            />
            <NumberField
              label="to"
              value={target?.setup.high ?? 3}
              onChange={(high) => setRange({ low: target?.setup.low ?? -3, high })}
            />
            {others.map((value, index) => (
              <NumberField
                key={index}
                label={`x${index + 1}`}
                value={value}
                onChange={(next) => changeOther(index, next)}
              />
            ))}
            {isOther && (
              <button class="button button-small" type="button" onClick={() => change({ others: [...others, 1] })}>
                Add input x{others.length + 1}
              </button>
            )}
          </div>
          <fieldset class="params">
            <legend class="small">Params</legend>
            {state.params.map((param, index) => (
              <div class="params-row" key={index}>
                <label class="field">
                  <span class="visually-hidden">Name of param {index + 1}</span>
                  <input
                    class="input input-code"
                    value={param.name}
                    placeholder="name"
                    autocomplete="off"
                    autocapitalize="off"
                    spellcheck={false}
                    aria-invalid={!!param.name && !/^[A-Za-z_]\w*$/.test(param.name)}
                    onInput={(event) => changeParam(index, { name: event.currentTarget.value })}
                  />
                </label>
                <NumberField
                  label={`Value of ${param.name || `param ${index + 1}`}`}
                  hidden
                  value={param.value}
                  onChange={(value) => changeParam(index, { value })}
                />
                <button
                  class="button"
                  type="button"
                  aria-label={`Remove param ${param.name || index + 1}`}
                  onClick={() => change({ params: state.params.filter((_, at) => at !== index) })}
                >
                  ✕
                </button>
              </div>
            ))}
            <div class="row">
              {missing && (
                <button
                  class="button button-primary button-small"
                  type="button"
                  onClick={() => change({ params: [...state.params, { name: missing, value: 1 }] })}
                >
                  Add param {missing}
                </button>
              )}
              <button
                class="button button-small"
                type="button"
                onClick={() => change({ params: [...state.params, { name: "", value: 1 }] })}
              >
                Add a param
              </button>
            </div>
          </fieldset>
        </div>
      </section>
      <div class="columns">
        <div class="stack">
          <CurveCard state={study} showError={!expressionError} />
          <SpecialCard state={study} />
        </div>
        <div class="stack">
          <CheckCard state={study} noOp="Choose an op to compare the rule with finite differences of it." />
          <section class="card stack" aria-labelledby="use-title">
            <h2 id="use-title">Use it without registering it</h2>
            <h3>Python</h3>
            <CodeBlock code={snippets.python} label="Python override" />
            <h3>JSON</h3>
            <CodeBlock code={snippets.json} label="JSON override" />
          </section>
        </div>
      </div>
    </>
  );
}

function targetOf(state: PlaygroundState, range: { low: number; high: number } | undefined): Target | undefined {
  if (!state.expression.trim()) return undefined;
  const setup = {
    ...setupOfOp(state.opType, state.expression, state.others),
    ...(range && range.low < range.high ? range : {}),
  };
  setup.overDy = (!state.opType || state.opType === "Identity") && usesOnlyDy(state.expression);
  return { source: { definition: definitionOf(state) }, setup, params: {} };
}

/** Returns the error of the expression itself; undefined for errors of the connection, the op or the params. */
function errorOf(error: unknown): ExpressionError | undefined {
  if (!(error instanceof ApiError)) return undefined;
  const { reason, detail } = error.problem;
  if (
    ![
      "INVALID_EXPRESSION",
      "INVALID_RULE",
      "RULE_NOT_APPLICABLE",
      "RULE_ARITY",
      "MISSING_FEED",
      "RULE_OUTPUT",
    ].includes(reason ?? "")
  )
    return undefined;
  // The server draws the column under the expression for terminals.
  const message = detail.split("\n")[0]!;
  const column = message.match(/ ?\(column (\d+)\)/);
  if (reason === "MISSING_FEED")
    return { message: "The rule uses the op’s output or its own gradient. Choose the op." };
  return column ? { message: message.replace(column[0], ""), column: Number(column[1]) } : { message };
}
