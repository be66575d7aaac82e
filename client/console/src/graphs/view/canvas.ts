import type { GraphData } from "./graph_data";
import {
  badgeWidth,
  HEAD,
  LABEL_SIZE,
  LEAF_HEIGHT,
  nameOf,
  pathOf,
  type Layout,
  type Measure,
  type Placed,
  type Route,
  TEXT_SIZE,
} from "./graph_layout";

const SVG = "http://www.w3.org/2000/svg";
export const FONT = 'ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

/** Makes an SVG element. Texts of the graph become text nodes and attributes only, never markup. */
export function svg(name: string, attributes: Record<string, string | number>, ...inside: SVGElement[]): SVGElement {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...inside);
  return element;
}

function words(text: string, attributes: Record<string, string | number>): SVGElement {
  const element = svg("text", attributes);
  element.textContent = text;
  return element;
}

/** Returns a function that measures texts in the font of boxes. */
export function makeMeasure(): Measure {
  const context = document.createElement("canvas").getContext("2d")!;
  const known = new Map<string, number>();
  return (text, size) => {
    const key = `${size} ${text}`;
    let width = known.get(key);
    if (width === undefined) {
      context.font = `${size}px ${FONT}`;
      width = context.measureText(text).width;
      known.set(key, width);
    }
    return width;
  };
}

/** What is marked in a drawing. */
export interface Marks {
  hits: ReadonlySet<number>;
  current: number | null;
  selected: number | null;
}

/** Returns the elements of a drawing: open scopes, edges, texts of edges, boxes. */
export function drawGraph(graph: GraphData, layout: Layout, marks: Marks, measure: Measure): SVGElement[] {
  const classesOf = (box: number) => {
    const more = [
      marks.hits.has(box) && "hit",
      marks.current === box && "current",
      marks.selected === box && "selected",
    ];
    return [graph.classes[box], ...more.filter(Boolean)].join(" ");
  };
  const backgrounds = layout.boxes
    .filter((at) => at.open)
    .map((at) => svg("g", { class: `open ${classesOf(at.box)}` }, body(at, 9)));
  const edges = layout.routes.map((route) => edgeOf(route, marks.selected));
  const texts = layout.routes
    .filter(({ text }) => text)
    .map(({ text, at }) => words(text, { class: "tensor", x: at.x, y: at.y + 4, "text-anchor": "middle" }));
  const boxes = layout.boxes.map((at) => (at.open ? headOf(graph, at) : boxOf(graph, at, classesOf(at.box), measure)));
  return [...backgrounds, ...edges, ...texts, ...boxes];
}

function edgeOf(route: Route, selected: number | null): SVGElement {
  const near = route.source === selected || route.target === selected;
  const tip = near ? "near" : route.onPath ? "thick" : "plain";
  return svg("path", {
    class: `edge${route.onPath ? " path" : ""}${near ? " near" : ""}`,
    d: pathOf(route.points),
    "marker-end": `url(#gv-${tip})`,
    "data-edge": `${route.source} ${route.target}`,
  });
}

/** Returns the arrow heads, for the drawing's `defs`. */
export function arrows(): SVGElement[] {
  return ["plain", "thick", "near"].map((name) => {
    const shape = {
      viewBox: "0 0 8 8",
      refX: 7,
      refY: 4,
      markerWidth: 8,
      markerHeight: 8,
      markerUnits: "userSpaceOnUse",
    };
    const tip = svg("path", { class: `tip ${name}`, d: "M0,0.5 L8,4 L0,7.5 z" });
    return svg("marker", { id: `gv-${name}`, ...shape, orient: "auto" }, tip);
  });
}

function body(at: { x: number; y: number; w: number; h: number }, radius: number): SVGElement {
  return svg("rect", { class: "body", x: at.x, y: at.y, width: at.w, height: at.h, rx: radius });
}

function control(graph: GraphData, at: Placed, className: string, ...inside: SVGElement[]): SVGElement {
  const isScope = graph.children[at.box]!.length > 0;
  const label = `${graph.titles[at.box]}, ${graph.subtitles[at.box]}`;
  const element = svg(
    "g",
    { class: className, role: "button", "data-box": at.box, tabindex: -1, "aria-label": label },
    ...inside,
  );
  if (isScope) element.setAttribute("aria-expanded", String(at.open));
  return element;
}

function headOf(graph: GraphData, at: Placed): SVGElement {
  const head = svg("rect", { class: "head", x: at.x, y: at.y, width: at.w, height: HEAD, rx: 9 });
  const text = words(`▾ ${at.label}`, { class: "name", x: at.x + at.labelAt, y: at.y + 19, "font-size": LABEL_SIZE });
  return control(graph, at, "opened", head, text);
}

function boxOf(graph: GraphData, at: Placed, className: string, measure: Measure): SVGElement {
  const { box } = at;
  const isScope = graph.children[box]!.length > 0;
  const rule = graph.rule[box]!;
  const parts: SVGElement[] = [];
  if (isScope) parts.push(svg("rect", { class: "behind", x: at.x + 4, y: at.y + 4, width: at.w, height: at.h, rx: 6 }));
  parts.push(body(at, 6));
  if (rule >= 0) parts.push(mark(graph, rule, graph.legend[rule]!.mark, at.x + 8, at.y + LEAF_HEIGHT / 2 - 9, 17, 18));
  const left = at.x + 12 + (rule >= 0 ? 20 : 0);
  parts.push(words(nameOf(graph, box, at.label), { class: "first", x: left, y: at.y + 18, "font-size": LABEL_SIZE }));
  parts.push(words(graph.subtitles[box]!, { class: "second", x: left, y: at.y + 35, "font-size": TEXT_SIZE }));
  let right = at.x + at.w - 13;
  for (const [word, pill] of Object.entries(graph.pills)) {
    if (!graph.classes[box]!.split(" ").includes(word)) continue;
    parts.push(pillOf(word, pill, right, at.y + 13));
    right -= 19;
  }
  let x = at.x + 12;
  for (const [of, text] of graph.badges[box]!) {
    const width = badgeWidth(text, measure);
    parts.push(mark(graph, of, text, x, at.y + LEAF_HEIGHT - 2, width, 18));
    x += width + 4;
  }
  if (graph.more[box])
    parts.push(words("…", { class: "second", x, y: at.y + LEAF_HEIGHT + 12, "font-size": TEXT_SIZE }));
  const element = control(graph, at, className, ...parts);
  if (rule >= 0) colour(element, graph, rule);
  return element;
}

/** Returns a mark of a rule: a letter on the rule's colour. */
export function mark(
  graph: GraphData,
  rule: number,
  text: string,
  x: number,
  y: number,
  w: number,
  h: number,
): SVGElement {
  const background = svg("rect", { class: "mark", x, y, width: w, height: h, rx: 4 });
  const middle = { class: "mark", x: x + w / 2, y: y + h - 5, "text-anchor": "middle", "font-size": TEXT_SIZE };
  return colour(svg("g", {}, background, words(text, middle)), graph, rule);
}

/** Returns the mark of an x, a y or a node with an error. */
export function pillOf(word: string, text: string, x: number, y: number): SVGElement {
  const label = words(text, { class: "pill", x, y: y + 4, "text-anchor": "middle", "font-size": TEXT_SIZE });
  return svg("g", {}, svg("circle", { class: `pill ${word}`, cx: x, cy: y, r: 8 }), label);
}

function colour(element: SVGElement, graph: GraphData, rule: number): SVGElement {
  const [background, text] = graph.palette[rule % graph.palette.length]!;
  element.style.setProperty("--rule", background);
  element.style.setProperty("--on-rule", text);
  return element;
}
