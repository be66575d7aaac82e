import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { numberText } from "../api/numbers";
import { cssColour, useColourChange } from "../theme";

export interface PlotLine {
  label: string;
  values: readonly (number | undefined)[];
  /** CSS variable of the colour, for example `--curve-1`. */
  colour: string;
  width?: number;
  dash?: number[];
}

/** Shortest time that a live plot shows, so that it has an axis before its second value. */
const LIVE_SECONDS = 20;

/**
 * Draws lines over x, with a legend that shows the values at the cursor. The cursor follows the mouse or a slider.
 *
 * A `live` plot is over time up to 0, in seconds. Its values start at 0; it has no slider, and shows the last values without a
 * cursor.
 */
export function Plot({
  x,
  lines,
  axis,
  label,
  height = 300,
  live = false,
}: {
  x: readonly number[];
  lines: PlotLine[];
  axis: string;
  label: string;
  height?: number;
  live?: boolean;
}) {
  const frame = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | undefined>(undefined);
  const [cursor, setCursor] = useState<number>();
  const colours = useColourChange();
  const shape = lines.map((line) => line.label + line.colour).join();
  const data = [
    x,
    ...lines.map((line) => line.values.map((value) => (Number.isFinite(value) ? value : null))),
  ] as uPlot.AlignedData;
  const latest = useRef(data);
  latest.current = data;

  useEffect(() => {
    const element = frame.current!;
    const text = cssColour("--muted");
    const axisStyle = {
      stroke: text,
      grid: { stroke: cssColour("--grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height,
        legend: { show: false },
        scales: {
          x: { time: false, ...(live ? { range: (_, least) => [Math.min(least, -LIVE_SECONDS), 0] } : {}) },
          y: live ? { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } : {},
        },
        axes: [
          { ...axisStyle, label: axis, labelSize: 20, labelFont: "13px system-ui, sans-serif", size: 32 },
          { ...axisStyle, size: 52 },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            stroke: cssColour(line.colour),
            width: line.width ?? 2,
            points: { show: false },
            ...(line.dash ? { dash: line.dash } : {}),
          })),
        ],
        cursor: { drag: { x: false, y: false }, points: { size: 7 } },
        hooks: { setCursor: [(self) => setCursor(self.cursor.idx ?? undefined)] },
      },
      latest.current,
      element,
    );
    plot.current = made;
    // A drawing without text is an image to a screen reader; the legend and the tables have its numbers.
    element.querySelector("canvas")?.setAttribute("aria-hidden", "true");
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [colours, shape, axis, height]);

  useEffect(() => plot.current?.setData(latest.current), [x, lines]);

  const index = cursor !== undefined && cursor < x.length ? cursor : live ? x.length - 1 : undefined;
  const move = (to: number) => {
    const self = plot.current;
    if (!self) return;
    setCursor(to);
    self.setCursor({ left: self.valToPos(x[to]!, "x"), top: 0 }, false);
  };
  return (
    <figure class="plot" aria-label={label}>
      <figcaption class="legend">
        {lines.map((line) => (
          <span class="legend-item">
            <svg class="legend-line" viewBox="0 0 24 8" aria-hidden="true">
              <line
                x1="0"
                y1="4"
                x2="24"
                y2="4"
                style={{ stroke: `var(${line.colour})` }}
                stroke-width={line.width ?? 2}
                stroke-dasharray={line.dash?.map((length) => length / 1.5).join(" ")}
              />
            </svg>
            {line.label}
            <span class="legend-value number">
              {index === undefined ? "" : numberText(line.values[index] ?? NaN, 4)}
            </span>
          </span>
        ))}
      </figcaption>
      <div ref={frame} class="plot-frame" style={{ height: `${height}px` }} />
      {!live && (
        <label class="plot-slider small muted">
          <span class="number">
            {axis} = {index === undefined ? "…" : numberText(x[index]!, 4)}
          </span>
          <input
            type="range"
            min={0}
            max={x.length - 1}
            value={index ?? Math.floor(x.length / 2)}
            aria-label={`Position on ${axis}`}
            aria-valuetext={
              index === undefined
                ? undefined
                : `${axis} = ${numberText(x[index]!, 4)}: ${lines.map((line) => `${line.label} ${numberText(line.values[index] ?? NaN, 4)}`).join(", ")}`
            }
            onInput={(event) => move(Number(event.currentTarget.value))}
          />
        </label>
      )}
    </figure>
  );
}
