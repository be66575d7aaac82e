import { useEffect, useRef, useState } from "preact/hooks";
import { isAbort } from "../api/client";
import { numberText } from "../api/numbers";
import { answersOfToken } from "../api/token";
import type { Rule } from "../api/types";
import { problemOf } from "../ui/states";
import { defaultOf, ruleName } from "./rule-text";
import { PointSampler, sampleCurve, type Curve } from "./sampling";
import { EXAMPLE_PARAMS, NoSetupError, setupOfRule } from "./setups";

const POINTS = 121;
const WIDTH = 240;
const HEIGHT = 120;
const LEFT = 30;

// Curves stay when the gallery is opened again. A rule's digest changes with its content. Errors of calls do not stay.
const curves = answersOfToken<Curve | NoSetupError>();

/** Small curve of a rule's gradient; it is sampled when it is first seen. */
export function Thumbnail({ rule }: { rule: Rule }) {
  const key = `${rule.name} ${rule.digest ?? ""}`;
  const [drawn, setDrawn] = useState<Curve | Error | undefined>(curves.get(key));
  const [attempt, setAttempt] = useState(0);
  const frame = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (drawn !== undefined) return undefined;
    const cancel = new AbortController();
    const seen = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        seen.disconnect();
        draw(rule, cancel.signal).then(
          (curve) => {
            curves.set(key, curve);
            setDrawn(curve);
          },
          (error: unknown) => isAbort(error) || setDrawn(error as Error),
        );
      },
      { rootMargin: "200px" },
    );
    seen.observe(frame.current!);
    return () => {
      seen.disconnect();
      cancel.abort();
    };
  }, [key, attempt]);
  const retry = () => {
    setDrawn(undefined);
    setAttempt(attempt + 1);
  };
  return (
    <div ref={frame} class="thumbnail">
      {drawn === undefined ? (
        <div class="loading-line" aria-hidden="true" />
      ) : drawn instanceof Error ? (
        <div class="thumbnail-text small muted">
          <p>No curve: {drawn instanceof NoSetupError ? drawn.message : problemOf(drawn).detail}</p>
          {!(drawn instanceof NoSetupError) && (
            <button class="button button-small" type="button" onClick={retry}>
              Try again
            </button>
          )}
        </div>
      ) : (
        <CurveImage curve={drawn} name={ruleName(rule)} />
      )}
    </div>
  );
}

/** Returns the params with which a rule is drawn. Throws NoSetupError if one has no value. */
export function exampleParams(rule: Rule): Record<string, number> {
  const found: Record<string, number> = {};
  for (const param of rule.definition?.params ?? []) {
    if (param.defaultValue !== undefined) {
      const value = defaultOf(param);
      if (value !== undefined) found[param.name] = value;
      continue;
    }
    const example = EXAMPLE_PARAMS.get(param.name);
    if (example === undefined || rule.kind !== "RULE_KIND_BUILTIN")
      throw new NoSetupError(`the param ${param.name} has no default`);
    found[param.name] = example;
  }
  return found;
}

/** Returns the curve of a rule, or why it can have none. */
async function draw(rule: Rule, signal: AbortSignal): Promise<Curve | NoSetupError> {
  try {
    const setup = setupOfRule(rule);
    const target = { source: { name: ruleName(rule) }, setup, params: exampleParams(rule) };
    return await sampleCurve(new PointSampler(target, rule.perSample), POINTS, signal);
  } catch (error) {
    if (error instanceof NoSetupError) return error;
    throw error;
  }
}

function CurveImage({ curve, name }: { curve: Curve; name: string }) {
  const shown = [curve.dx, ...(curve.y ? [curve.y] : []), ...(curve.opposite ? [curve.opposite] : [])];
  const finite = shown.flat().filter(Number.isFinite);
  let low = Math.min(0, ...finite);
  let high = Math.max(0, ...finite);
  if (high - low < 1e-9) [low, high] = [low - 1, high + 1];
  const margin = (high - low) * 0.06;
  const first = curve.x[0]!;
  const last = curve.x.at(-1)!;
  const left = (x: number) => LEFT + ((x - first) / (last - first)) * (WIDTH - LEFT - 2);
  const top = (y: number) => HEIGHT - ((y - low + margin) / (high - low + 2 * margin)) * HEIGHT;
  const path = (values: readonly number[]) => {
    let command = "M";
    return values
      .map((value, index) => {
        if (!Number.isFinite(value)) {
          command = "M";
          return "";
        }
        const point = `${command}${left(curve.x[index]!).toFixed(1)} ${top(value).toFixed(1)}`;
        command = "L";
        return point;
      })
      .join("");
  };
  const zero = first < 0 && last > 0 ? left(0) : undefined;
  return (
    <svg
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      role="img"
      aria-label={`Gradient of ${name} over ${curve.axis}, from ${numberText(Math.min(...curve.dx), 3)} to ${numberText(Math.max(...curve.dx), 3)}`}
    >
      <line class="curve-axis" x1={LEFT} x2={WIDTH} y1={top(0)} y2={top(0)} />
      {zero !== undefined && <line class="curve-axis" x1={zero} x2={zero} y1="0" y2={HEIGHT} />}
      {[high, low].map((value) => (
        <text class="curve-label" x={LEFT - 4} y={Math.min(HEIGHT - 2, Math.max(10, top(value) + 4))} text-anchor="end">
          {numberText(value, 2)}
        </text>
      ))}
      {curve.y && <path class="curve-forward" d={path(curve.y)} />}
      {curve.opposite && <path class="curve-opposite" d={path(curve.opposite)} />}
      <path class="curve-gradient" d={path(curve.dx)} />
    </svg>
  );
}
