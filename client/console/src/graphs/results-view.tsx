import { useEffect, useRef } from "preact/hooks";
import {
  commonRange,
  difference,
  histogram,
  imageShape,
  isColour,
  elementText,
  numberOf,
  type Numbers,
  numberText,
  pixels,
  type Range,
  shareText,
  summary,
  type Value,
} from "./results";

/** The answer of one column, by kind and name of tensor. */
export interface ColumnResult {
  title: string;
  values: Map<string, Value>;
  error?: string;
}

const BINS = 24;
const SHOWN = 60;

/**
 * Shows outputs and gradients of one or several columns side by side, with their differences from the first.
 *
 * `outdated`: they are of other settings than the page has now.
 */
export function Results({ results, outdated = false }: { results: ColumnResult[]; outdated?: boolean }) {
  const keys = [...new Set(results.flatMap(({ values }) => [...values.keys()]))];
  return (
    <section class="stack" aria-label="Results">
      <h2>Results</h2>
      {outdated && (
        <p class="notice" role="status">
          Settings have changed since these results were computed. Choose Run to compute them again.
        </p>
      )}
      {results.map(({ title, error }) => error && <p class="field-error">{`${title}: ${error}`}</p>)}
      {keys.map((key) => {
        const values = results.map((result) => result.values.get(key) ?? { missing: "not computed" });
        const range = commonRange(values.filter((value): value is Numbers => "values" in value));
        return (
          <section class="card stack" aria-label={key}>
            <h3>{key}</h3>
            <div class="graph-results">
              {values.map((value, index) => (
                <Cell
                  title={results[index]!.title}
                  value={value}
                  first={index ? values[0]! : undefined}
                  range={range}
                />
              ))}
            </div>
          </section>
        );
      })}
    </section>
  );
}

interface CellProps {
  title: string;
  value: Value;
  /** The first column, if this is another one. */
  first: Value | undefined;
  range: Range;
}

function Cell({ title, value, first, range }: CellProps) {
  if ("missing" in value) {
    return (
      <div class="graph-result">
        <b>{title}</b>
        <p class="muted">{value.missing}</p>
      </div>
    );
  }
  const facts = summary(value.values);
  const apart = first && "values" in first ? difference(first, value) : undefined;
  return (
    <div class="graph-result">
      <b>{title}</b>
      <span class="muted small">
        {value.dtype} [{value.shape.join(", ")}]
      </span>
      <dl class="graph-figures">
        <dt>norm</dt>
        <dd>{numberText(facts.norm)}</dd>
        <dt>mean</dt>
        <dd>{numberText(facts.mean)}</dd>
        <dt>min, max</dt>
        <dd>
          {numberOf(value.dtype, facts.least)}, {numberOf(value.dtype, facts.most)}
        </dd>
        <dt>zeros</dt>
        <dd>{shareText(facts.zeros, facts.count)}</dd>
        {facts.notFinite > 0 && (
          <>
            <dt class="field-error">not finite</dt>
            <dd class="field-error">{facts.notFinite}</dd>
          </>
        )}
        {apart && (
          <>
            <dt>largest difference</dt>
            <dd>{numberOf(value.dtype, apart.most)}</dd>
            <dt>cosine</dt>
            <dd>{Number.isNaN(apart.cosine) ? "–" : numberText(apart.cosine)}</dd>
          </>
        )}
      </dl>
      {imageShape(value.shape) ? <Image value={value} range={range} title={title} /> : null}
      {facts.count > 3 && <Histogram value={value} range={range} />}
      <details>
        <summary>Numbers</summary>
        <pre class="graph-numbers">{numbersText(value)}</pre>
      </details>
    </div>
  );
}

function numbersText(value: Numbers): string {
  const { values, shape } = value;
  const row = shape.at(-1) ?? 1;
  const shown = Array.from(values.slice(0, SHOWN), (_, index) => elementText(value, index));
  const width = Math.max(...shown.map((text) => text.length));
  const lines: string[] = [];
  const perLine = Math.max(1, Math.min(row, 8));
  for (let at = 0; at < shown.length; at += perLine) {
    lines.push(
      shown
        .slice(at, at + perLine)
        .map((text) => text.padStart(width))
        .join(" "),
    );
  }
  return lines.join("\n") + (values.length > SHOWN ? `\n… ${values.length - SHOWN} more` : "");
}

/** Bars of counts, with the same horizontal range in all columns. */
function Histogram({ value: { values, dtype }, range }: { value: Numbers; range: Range }) {
  if (!Number.isFinite(range.least)) return null;
  const counts = histogram(values, range.least, range.most, BINS);
  const highest = Math.max(...counts, 1);
  const [least, most] = [numberOf(dtype, range.least), numberOf(dtype, range.most)];
  const label = `Histogram from ${least} to ${most}, largest count ${highest}`;
  return (
    <figure class="graph-histogram">
      <svg viewBox={`0 0 ${BINS * 10} 60`} preserveAspectRatio="none" role="img" aria-label={label}>
        {counts.map((count, bin) => (
          <rect x={bin * 10 + 1} y={60 - (58 * count) / highest} width="8" height={(58 * count) / highest} />
        ))}
      </svg>
      <figcaption>
        <span>{least}</span>
        <span>{most}</span>
      </figcaption>
    </figure>
  );
}

function Image({ value, range, title }: { value: Numbers; range: Range; title: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width, height, count, channels } = imageShape(value.shape)!;
  const end = numberText(Math.max(Math.abs(range.least), Math.abs(range.most)));
  const scale = isColour(value.shape, range) ? "colours from 0 to 1" : `blue −${end}, white 0, orange ${end}`;
  useEffect(() => {
    const image = new ImageData(pixels(value, range), width, height);
    canvas.current?.getContext("2d")!.putImageData(image, 0, 0);
  }, [value, range.least, range.most]);
  return (
    <figure class="graph-image">
      <canvas ref={canvas} width={width} height={height} role="img" aria-label={`Image of ${title}`} />
      <figcaption class="muted small">
        {count > 1 && `first of ${count}; `}
        {channels === 3 && !isColour(value.shape, range) && "mean of 3 channels; "}
        {scale}
      </figcaption>
    </figure>
  );
}
