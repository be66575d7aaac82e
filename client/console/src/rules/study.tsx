import { useEffect, useState } from "preact/hooks";
import { isAbort } from "../api/client";
import { numberText } from "../api/numbers";
import { Plot, type PlotLine } from "../ui/plot";
import { ErrorBox, Loading, problemOf } from "../ui/states";
import { isElementwise, sampleBreaks, type Breaks } from "./breaks";
import { checkGradient, sampleSpecial, type Check, type SpecialValue } from "./check";
import { PointSampler, sampleCurve, type Curve, type Target } from "./sampling";
import { forwardText } from "./setups";

/** What the server computed for a rule: its curve, its values at special numbers, and the check of its gradient. */
export interface Study {
  /** The target of the curve; the one of the inputs may be newer. */
  target: Target;
  curve: Curve;
  special?: SpecialValue[];
  check?: Check;
  /** Why the gradient was not checked. */
  notChecked?: string;
}

export interface StudyState {
  study?: Study;
  error?: unknown;
  busy: boolean;
}

const POINTS = 241;
const DELAY_MS = 200;

/**
 * Samples a rule, and again when the target changes.
 *
 * @param target The rule; an error if the input describes none; undefined: nothing to run yet.
 * @param perSample The registry's word on whether examples are independent; undefined: find out.
 * @param key Text that changes with the target.
 */
export function useStudy(target: Target | Error | undefined, perSample: boolean | undefined, key: string): StudyState {
  const [state, setState] = useState<StudyState>({ busy: true });
  useEffect(() => {
    if (!target || target instanceof Error) {
      setState((before) => (target ? { ...before, error: target, busy: false } : { busy: false }));
      return undefined;
    }
    const cancel = new AbortController();
    setState((before) => ({ ...before, busy: true }));
    const timer = setTimeout(() => {
      run(target, perSample, cancel.signal, (study, busy) => cancel.signal.aborted || setState({ study, busy })).catch(
        (error: unknown) => {
          if (!cancel.signal.aborted && !isAbort(error)) setState((before) => ({ ...before, error, busy: false }));
        },
      );
    }, DELAY_MS);
    return () => {
      clearTimeout(timer);
      cancel.abort();
    };
  }, [key]);
  return state;
}

async function run(
  target: Target,
  perSample: boolean | undefined,
  signal: AbortSignal,
  show: (study: Study, busy: boolean) => void,
): Promise<void> {
  const sampler = new PointSampler(target, perSample);
  let study: Study = { target, curve: await sampleCurve(sampler, POINTS, signal) };
  show(study, true);
  const add = (part: Partial<Study>) => {
    study = { ...study, ...part };
    show(study, true);
  };
  const breaks = await breaksOrReason(target, signal);
  const none: Breaks = { op: [], rule: [] };
  await Promise.all([
    sampleSpecial(sampler, typeof breaks === "string" ? none : breaks, signal).then((special) => add({ special })),
    typeof breaks === "string"
      ? add({ notChecked: breaks })
      : checkGradient(target, breaks, signal).then((check) => check && add({ check })),
  ]);
  show(study, false);
}

/** Returns the kinks and jumps, or why they, and so the gradient, cannot be found out. */
async function breaksOrReason(target: Target, signal: AbortSignal): Promise<Breaks | string> {
  try {
    if (await isElementwise(target, signal)) return await sampleBreaks(target, signal);
    return "The rule or the op uses several elements at once, so it cannot be compared number by number.";
  } catch (error) {
    // Not every op supports float64.
    if (isAbort(error)) throw error;
    return problemOf(error).detail;
  }
}

/** Curve of a study, or the error of the current input. */
export function CurveCard({ state, showError = true }: { state: StudyState; showError?: boolean }) {
  const { study, error } = state;
  return (
    <section class="card stack" aria-labelledby="curve-title" aria-busy={state.busy}>
      <h2 id="curve-title">Curve</h2>
      {error !== undefined && showError && <ErrorBox error={error} />}
      {study ? (
        <div class={error === undefined ? undefined : "outdated"}>
          <Plot x={study.curve.x} lines={linesOf(study)} axis={study.curve.axis} label="Curve of the rule" />
          {study.curve.isPointwise && (
            <p class="small muted">
              The rule reads several elements. Each point is in a tensor [x, 0] of its own; dy is 0 for the second
              element.
            </p>
          )}
        </div>
      ) : (
        <div class="plot-room">
          {error === undefined && state.busy ? (
            <Loading what="the curve" lines={6} />
          ) : showError ? null : (
            <p class="muted">The curve appears when the input is right.</p>
          )}
        </div>
      )}
    </section>
  );
}

function linesOf({ curve, target }: Study): PlotLine[] {
  const forward = forwardText(target.setup);
  const lines: PlotLine[] = [];
  if (curve.y) lines.push({ label: forward || "the op", values: curve.y, colour: "--line-strong", width: 1.5 });
  lines.push({
    label: curve.axis === "dy" ? "rule" : "rule, dy = 1",
    values: curve.dx,
    colour: "--curve-1",
    width: 2.5,
  });
  // Over the rule, so that both are seen where they are equal.
  if (curve.own)
    lines.push({
      label: `gradient of ${target.setup.opType ?? forward}`,
      values: curve.own,
      colour: "--curve-2",
      width: 2,
      dash: [6, 5],
    });
  if (curve.opposite)
    lines.push({ label: "rule, dy = −1", values: curve.opposite, colour: "--curve-4", width: 1.5, dash: [2, 3] });
  return lines;
}

/** Table of the values at kinks, at -1, 0, 1, and at numbers that are not finite. */
export function SpecialCard({ state }: { state: StudyState }) {
  const values = state.study?.special;
  const axis = state.study?.curve.axis ?? "x";
  const hasOp = values?.[0]?.y !== undefined;
  return (
    <section class="card stack" aria-labelledby="special-title">
      <h2 id="special-title">Values at kinks and special numbers</h2>
      <div class={state.error === undefined || !values ? "table-frame" : "table-frame outdated"}>
        <table class="table">
          <thead>
            <tr>
              <th scope="col" class="number">
                {axis}
              </th>
              {hasOp && (
                <th scope="col" class="number">
                  {state.study && forwardText(state.study.target.setup)}
                </th>
              )}
              {hasOp && (
                <th scope="col" class="number">
                  Own gradient
                </th>
              )}
              <th scope="col" class="number">
                Rule
              </th>
            </tr>
          </thead>
          <tbody>
            {(values ?? Array.from({ length: 6 }, () => undefined)).map((value) => (
              <tr>
                {value ? (
                  <th scope="row" class="number">
                    {numberText(value.x)}
                  </th>
                ) : (
                  <td>{"\u00a0"}</td>
                )}
                {hasOp && <Value value={value?.y} />}
                {hasOp && <Value value={value?.own} />}
                <Value value={value?.dx} />
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Value({ value }: { value: number | undefined }) {
  const odd = value !== undefined && !Number.isFinite(value);
  return (
    <td class="number">
      {value === undefined ? "" : odd ? <span class="tag tag-warn">{numberText(value)}</span> : numberText(value)}
    </td>
  );
}

/** Result of the comparison with finite differences. */
export function CheckCard({
  state,
  isTrueGradient,
  noOp,
}: {
  state: StudyState;
  isTrueGradient?: boolean | undefined;
  /** What to do if no op is known. */
  noOp: string;
}) {
  const { study } = state;
  const check = study?.check;
  return (
    <section class="card stack" aria-labelledby="check-title">
      <h2 id="check-title">Gradient check</h2>
      <div class={state.error === undefined || !study ? "stack check" : "stack check outdated"} role="status">
        {check ? (
          <Verdict check={check} isTrueGradient={isTrueGradient} />
        ) : (
          <p class="muted">
            {state.busy
              ? "Comparing with finite differences…"
              : (study?.notChecked ?? (study ? noOp : "No curve to check."))}
          </p>
        )}
      </div>
    </section>
  );
}

function Verdict({ check, isTrueGradient }: { check: Check; isTrueGradient: boolean | undefined }) {
  const holds = check.different === 0;
  const points = check.compared.toLocaleString("en");
  return (
    <>
      <p>
        {holds ? (
          <span class="tag tag-good">Equal</span>
        ) : (
          <span class={isTrueGradient ? "tag tag-bad" : "tag"}>{isTrueGradient ? "Wrong" : "Different"}</span>
        )}{" "}
        {holds ? (
          <>
            The rule equals central differences of <code>{check.of}</code> at {points} points from{" "}
            {numberText(check.low)} to {numberText(check.high)}. The largest difference is{" "}
            {numberText(check.largest, 2)} × dy.
          </>
        ) : (
          <>
            The rule differs from central differences of <code>{check.of}</code> at{" "}
            {check.different.toLocaleString("en")} of {points} points from {numberText(check.low)} to{" "}
            {numberText(check.high)}. A surrogate gradient does so on purpose.
          </>
        )}
      </p>
      {!holds && (
        <dl class="facts number">
          <dt>Largest at x</dt>
          <dd>
            {numberText(check.worst.x)}, dy = {numberText(check.worst.dy, 3)}
          </dd>
          <dt>Rule</dt>
          <dd>{numberText(check.worst.rule)}</dd>
          <dt>dy × difference</dt>
          <dd>{numberText(check.worst.expected)}</dd>
        </dl>
      )}
      <p class="small muted">Upstream gradients have both signs and sizes from 0.001 to 1000.</p>
      {check.kinks.length > 0 && (
        <p class="small muted">
          Not compared: {check.kinks.length === 1 ? "a kink or jump" : `${check.kinks.length} kinks or jumps`} of{" "}
          <code>{check.of}</code>, where the rule gives{" "}
          {check.kinks
            .slice(0, 6)
            .map((kink) => `${numberText(kink.rule, 3)} at ${numberText(kink.x, 3)}`)
            .join(", ")}
          {check.kinks.length > 6 && ", …"}
        </p>
      )}
    </>
  );
}
