import { useMemo } from "preact/hooks";
import { ApiError } from "../api/client";
import { go, href, type Route } from "../router";
import { CodeBlock } from "../ui/copy";
import { CreateRule } from "./create-rule";
import { ExpressionField, type ExpressionError } from "./expression-field";
import { NumberField } from "./number-field";
import { definitionOf, readState, stateLink, type PlaygroundState } from "./playground-state";
import { snippetsOfDefinition } from "./rule-text";
import type { Target } from "./sampling";
import { NoSetupError, setupOfOp, SETUPS, STEP, usesOnlyDy, type Setup } from "./setups";
import { CheckCard, CurveCard, SpecialCard, useStudy } from "./study";

const OPS = [...SETUPS.keys()].filter((name) => name !== "@activation" && name !== STEP);

/** Page where somebody writes a rule and sees its curve at once. The address holds what was typed. */
export function Playground({ route }: { route: Route }) {
  const state = useMemo(() => readState(route.query), [route]);
  const link = stateLink(state);
  const change = (part: Partial<PlaygroundState>) => go(stateLink({ ...state, ...part }), { replace: true });
  const changeParam = (index: number, part: Partial<{ name: string; value: number }>) =>
    change({ params: state.params.map((param, at) => (at === index ? { ...param, ...part } : param)) });

  const definition = useMemo(() => definitionOf(state), [link]);
  const setup = useMemo(() => setupOf(state), [link]);
  const target = useMemo(() => targetOf(state, setup), [link]);
  const study = useStudy(target, undefined, link);
  const { low, high, others } = setup instanceof NoSetupError ? { low: -3, high: 3, others: [] } : setup;
  const inputError = target instanceof Error ? target.message : undefined;
  const expressionError = errorOf(study.error);
  const missing = expressionError?.message.match(/^unknown name '([A-Za-z_]\w*)'/)?.[1];
  const isOther = state.opType !== "" && !SETUPS.has(state.opType);
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
        <CreateRule
          definition={definition}
          disabled={study.error !== undefined || study.busy || !target || target instanceof Error}
        />
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
                value={state.opType}
                onChange={(event) => change({ opType: event.currentTarget.value, others: [], range: undefined })}
              >
                <option value="">None</option>
                <option value={STEP}>Step: x &gt; 0</option>
                {OPS.map((name) => (
                  <option value={name}>{name}</option>
                ))}
                {!["", STEP, ...OPS].includes(state.opType) && <option value={state.opType}>{state.opType}</option>}
              </select>
            </label>
            <NumberField
              label="x from"
              value={low}
              isWrong={target instanceof RangeError}
              onChange={(next) => change({ range: { low: next, high } })}
            />
            <NumberField
              label="to"
              value={high}
              isWrong={target instanceof RangeError}
              onChange={(next) => change({ range: { low, high: next } })}
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
            <p class="field-error playground-problem" role="status">
              {inputError}
            </p>
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
          <CurveCard state={study} showError={!expressionError && !inputError} />
          <SpecialCard state={study} />
        </div>
        <div class="stack">
          <CheckCard state={study} noOp="Choose an op to compare the rule with finite differences of it." />
          <section class="card stack" aria-labelledby="use-title">
            <h2 id="use-title">Use it without registering it</h2>
            {expressionError || !state.expression.trim() ? (
              <p class="muted">Type a valid expression to get the code.</p>
            ) : (
              <>
                <h3>Python</h3>
                <CodeBlock code={snippets.python} label="Python override" />
                <h3>JSON</h3>
                <CodeBlock code={snippets.json} label="JSON override" />
              </>
            )}
          </section>
        </div>
      </div>
    </>
  );
}

/** Returns what to run; an error if there is no such op or range; undefined without an expression. */
function targetOf(state: PlaygroundState, setup: Setup | NoSetupError): Target | Error | undefined {
  if (!state.expression.trim()) return undefined;
  if (setup instanceof NoSetupError) return new Error(`Choose another op: ${setup.message}.`);
  if (!Number.isFinite(setup.low) || !Number.isFinite(setup.high) || setup.low >= setup.high)
    return new RangeError("The range must go from a number to a larger one.");
  return { source: { definition: definitionOf(state) }, setup, params: {} };
}

function setupOf({ expression, opType, others, range }: PlaygroundState): Setup | NoSetupError {
  try {
    const overDy = (!opType || opType === "Identity") && usesOnlyDy(expression);
    return { ...setupOfOp(opType, expression, others), ...range, overDy };
  } catch (error) {
    if (error instanceof NoSetupError) return error;
    throw error;
  }
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
