import { Graph, layout } from "@dagrejs/dagre";
import { type GraphData, hasClass, ROOT, type Tree } from "./graph_data";

/** Sizes of boxes in pixels at 100 %. */
export const LABEL_SIZE = 13;
export const TEXT_SIZE = 12;
const TEXT_HEIGHT = 16;
export const LEAF_HEIGHT = 44;
export const BADGE_HEIGHT = 22;
export const HEAD = 28;
const MARK_WIDTH = 22;
const PILL_WIDTH = 19;
const PAD = 12;
/** Most boxes that are drawn at once. A drawing with more is slow, and nobody can read it. */
export const MAX_BOXES = 300;
// Distinct edges that may enter or leave a scope; more share one place on its border.
const MAX_PORTS = 16;

/** Returns the width of a text in pixels, in the font of boxes. */
export type Measure = (text: string, size: number) => number;

export interface Rect {
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Placed extends Rect {
  box: number;
  label: string;
  open: boolean;
  /** Where the label of an open scope starts, relative to the box. */
  labelAt: number;
}

export interface Point {
  x: number;
  y: number;
}

export interface Route {
  source: number;
  target: number;
  onPath: boolean;
  points: Point[];
  /** Element type and shape of the tensor; empty if they are not known. */
  text: string;
  /** Middle of the text. */
  at: Point;
}

export interface Layout {
  /** Boxes, outer ones first. */
  boxes: Placed[];
  /** Edges, those on the path last. */
  routes: Route[];
  width: number;
  height: number;
}

/**
 * Computes the positions of visible boxes and the routes of edges between them.
 *
 * The library lays out one scope at a time, inner ones first: its mode for nested scopes took 16 s for 300 boxes. Edges across the
 * border of a scope pass a port on it.
 */
export function layoutGraph(tree: Tree, opened: ReadonlySet<number>, measure: Measure): Layout {
  const boxes = tree.visible(opened);
  const merged = [...mergeEdges(tree, new Set(boxes)).values()];
  const scopes = [ROOT, ...boxes.filter((box) => opened.has(box))];
  const segments = splitEdges(tree, scopes, merged);
  const laid = new Map<number, ScopeLayout>();
  for (const scope of [...scopes].reverse()) {
    laid.set(scope, layoutScope(tree, scope, segments.get(scope)!, laid, measure));
  }
  const rects = new Map<number, Rect>([[ROOT, { x: 0, y: 0, ...sizeOf(laid.get(ROOT)!) }]]);
  for (const scope of scopes) {
    const outer = rects.get(scope)!;
    for (const [child, at] of laid.get(scope)!.rects) rects.set(child, { ...at, x: outer.x + at.x, y: outer.y + at.y });
  }
  const placed = boxes.map((box): Placed => {
    const labelAt = laid.get(box)?.labelAt ?? PAD;
    return { ...rects.get(box)!, box, label: tree.labels[box]!, open: opened.has(box), labelAt };
  });
  const routes = merged.map((edge) => routeOf(edge, laid, rects));
  const ordered = [...routes.filter((route) => !route.onPath), ...routes.filter((route) => route.onPath)];
  const { w, h } = rects.get(ROOT)!;
  return { boxes: placed, routes: ordered, width: w, height: h };
}

/** End of a part of an edge inside a scope: a child, or a port at the top or bottom. */
type End = number | `${"in" | "out"} ${string}`;

interface Segment {
  from: End;
  to: End;
  /** Distinguishes edges between the same ends that come from different boxes. */
  name: string;
  text: string;
}

interface ScopeLayout {
  w: number;
  h: number;
  /** Where the scope's own label starts, between the edges that enter the scope. */
  labelAt: number;
  /** Children, relative to the scope. */
  rects: Map<number, Rect>;
  /** Horizontal positions of ports, relative to the scope. */
  ports: Map<End, number>;
  /** Routes of segments, and the places of their texts, relative to the scope. */
  routes: Map<string, { points: Point[]; at: Point }>;
}

const segmentKey = (from: End, to: End, name: string) => `${from}>${to}>${name}`;
const sizeOf = ({ w, h }: ScopeLayout) => ({ w, h });

/** Returns the parts of an edge from its source to its target, each with its scope. */
function partsOf(tree: Tree, { source, target }: Merged): { scope: number; from: End; to: End }[] {
  const { parents } = tree;
  const outer = new Set([...tree.around(source), ROOT]);
  const down: number[] = [target];
  while (!outer.has(parents[down[0]!]!)) down.unshift(parents[down[0]!]!);
  const meeting = parents[down[0]!]!;
  const parts: { scope: number; from: End; to: End }[] = [];
  let box = source;
  for (; parents[box] !== meeting; box = parents[box]!) {
    parts.push({ scope: parents[box]!, from: box, to: `out ${source}` });
  }
  parts.push({ scope: meeting, from: box, to: down[0]! });
  for (let index = 1; index < down.length; index += 1) {
    parts.push({ scope: down[index - 1]!, from: `in ${source}`, to: down[index]! });
  }
  return parts;
}

/** Returns the segments of all edges by scope. */
function splitEdges(tree: Tree, scopes: number[], merged: Merged[]): Map<number, Map<string, Segment>> {
  const found = new Map(scopes.map((scope) => [scope, new Map<string, Segment>()]));
  const sources = new Map<string, Set<number>>();
  const parts = merged.map((edge) => partsOf(tree, edge));
  merged.forEach((edge, index) => {
    for (const { scope, from, to } of parts[index]!) {
      for (const [end, side] of [
        [from, "in"],
        [to, "out"],
      ] as const) {
        if (typeof end === "number") continue;
        const key = `${scope} ${side}`;
        sources.set(key, (sources.get(key) ?? new Set()).add(edge.source));
      }
    }
  });
  const isShared = (scope: number, side: string) => (sources.get(`${scope} ${side}`)?.size ?? 0) > MAX_PORTS;
  merged.forEach((edge, index) => {
    edge.parts = parts[index]!.map(({ scope, from, to }) => {
      const start: End = typeof from === "number" || !isShared(scope, "in") ? from : "in shared";
      const end: End = typeof to === "number" || !isShared(scope, "out") ? to : "out shared";
      const isMeeting = typeof from === "number" && typeof to === "number";
      // The library does not take an empty name.
      const name = isMeeting ? String(edge.source) : "-";
      const key = segmentKey(start, end, name);
      const text = isMeeting ? edge.text : "";
      const known = found.get(scope)!.get(key);
      found.get(scope)!.set(key, { from: start, to: end, name, text: known && known.text !== text ? "" : text });
      return { scope, from: start, to: end, name };
    });
  });
  return found;
}

function layoutScope(
  tree: Tree,
  scope: number,
  segments: Map<string, Segment>,
  laid: Map<number, ScopeLayout>,
  measure: Measure,
): ScopeLayout {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 26, edgesep: 12, ranksep: 28 });
  for (const child of tree.children[scope]!) {
    const inner = laid.get(child);
    const width = inner?.w ?? boxWidth(tree, child, measure);
    graph.setNode(String(child), { width, height: inner?.h ?? boxHeight(tree, child) });
  }
  const ports = new Set<End>();
  for (const { from, to, name, text } of segments.values()) {
    for (const end of [from, to]) if (typeof end !== "number") ports.add(end);
    const size = text ? { width: measure(text, TEXT_SIZE), height: TEXT_HEIGHT, labelpos: "r", labeloffset: 6 } : {};
    for (const end of [from, to]) if (!graph.hasNode(String(end))) graph.setNode(String(end), { width: 1, height: 0 });
    graph.setEdge(String(from), String(to), size, name);
  }
  holdPorts(graph, ports);
  if (graph.nodeCount()) layout(graph);
  return measured(tree, scope, graph, segments, ports, measure);
}

/** Keeps ports in the first and last row: edges to them from two more nodes are worth more than all others. */
function holdPorts(graph: Graph, ports: ReadonlySet<End>): void {
  const real = graph.nodes().filter((node) => !ports.has(node as End));
  for (const [side, end] of [
    ["in", "first"],
    ["out", "last"],
  ] as const) {
    const held = [...ports].filter((port) => String(port).startsWith(side));
    if (!held.length) continue;
    graph.setNode(end, { width: 1, height: 0 });
    for (const port of held) connect(graph, side, end, String(port), 1000, 1);
    for (const node of real) {
      const edges = side === "in" ? graph.inEdges(node) : graph.outEdges(node);
      if (!edges?.length) connect(graph, side, end, node, 0, 2);
    }
  }
}

function connect(graph: Graph, side: "in" | "out", end: string, node: string, weight: number, minlen: number): void {
  const [from, to] = side === "in" ? [end, node] : [node, end];
  graph.setEdge(from, to, { weight, minlen }, "held");
}

type Drawn = { x: number; y: number; width: number; height: number };

function measured(
  tree: Tree,
  scope: number,
  graph: Graph,
  segments: Map<string, Segment>,
  ports: ReadonlySet<End>,
  measure: Measure,
): ScopeLayout {
  const drawn = (name: End) => graph.node(String(name)) as unknown as Drawn;
  const children = tree.children[scope]!;
  const keys = [...segments.values()];
  const edges = keys.map(
    ({ from, to, name }) => graph.edge(String(from), String(to), name) as { points: Point[]; width: number } & Point,
  );
  const spans = children.map((child) => drawn(child));
  const texts = edges.filter((_, index) => keys[index]!.text);
  const bends = edges.flatMap(({ points }) => points.map(({ x }) => x));
  const lefts = [...spans.map(({ x, width }) => x - width / 2), ...bends];
  const rights = [...[...spans, ...texts].map(({ x, width }) => x + width / 2), ...bends];
  const left = Math.min(...lefts, Infinity);
  const top = Math.min(...spans.map(({ y, height }) => y - height / 2));
  const bottom = Math.max(...spans.map(({ y, height }) => y + height / 2));
  const head = scope === ROOT ? PAD : HEAD + 6;
  const content = Math.max(...rights) - left;
  const name = scope === ROOT ? 0 : measure(`▾ ${tree.labels[scope]!}`, LABEL_SIZE);
  const least = Math.max(content, name + 8) + 2 * PAD;
  const dx = (least - content) / 2 - left;
  const entries = [...ports].filter((port) => String(port).startsWith("in")).map((port) => drawn(port).x + dx);
  const labelAt = freePlace(entries, name);
  const w = Math.max(least, labelAt + name + PAD);
  const dy = head - top;
  const h = bottom - top + head + PAD;
  const rects = new Map(
    children.map((child, index) => {
      const { x, y, width, height } = spans[index]!;
      return [child, { x: x - width / 2 + dx, y: y - height / 2 + dy, w: width, h: height }];
    }),
  );
  const rows = rowsOf([...rects.values()]);
  const routes: ScopeLayout["routes"] = new Map();
  keys.forEach(({ from, to, name, text }, index) => {
    const { points, x, y } = edges[index]!;
    const moved = points.map((point) => ({ x: point.x + dx, y: point.y + dy }));
    // The text of an edge is beside a straight part of it.
    const beside = text ? [{ middle: y + dy, top: y + dy - TEXT_HEIGHT / 2, bottom: y + dy + TEXT_HEIGHT / 2 }] : [];
    const passed = moved.slice(1, -1).flatMap((point) => alongRow(point, [...beside, ...rows]));
    const route = [moved[0]!, ...(moved[0]!.y > moved.at(-1)!.y ? passed.reverse() : passed), moved.at(-1)!];
    routes.set(segmentKey(from, to, name), { points: route, at: { x: (x ?? 0) + dx, y: (y ?? 0) + dy } });
  });
  return { w, h, labelAt, rects, ports: new Map([...ports].map((port) => [port, drawn(port).x + dx])), routes };
}

/** Returns the first place for a text that no vertical line crosses. */
function freePlace(lines: number[], width: number): number {
  const places = [PAD, ...lines.map((x) => x + 8).sort((a, b) => a - b)];
  return places.find((place) => !lines.some((x) => x > place - 8 && x < place + width + 8))!;
}

/** Returns the middle, top and bottom of each row of boxes. */
function rowsOf(rects: Rect[]): { middle: number; top: number; bottom: number }[] {
  const rows = new Map<number, { middle: number; top: number; bottom: number }>();
  for (const { y, h } of rects) {
    const middle = Math.round(y + h / 2);
    const row = rows.get(middle) ?? { middle, top: y, bottom: y + h };
    rows.set(middle, { middle, top: Math.min(row.top, y), bottom: Math.max(row.bottom, y + h) });
  }
  return [...rows.values()];
}

/** Lets an edge pass a row straight, so that it does not cross the boxes beside it; drops bends between rows. */
function alongRow({ x, y }: Point, rows: { middle: number; top: number; bottom: number }[]): Point[] {
  const row = rows.find(({ middle }) => Math.abs(middle - y) < 1);
  return row
    ? [
        { x, y: row.top },
        { x, y: row.bottom },
      ]
    : [];
}

/** Joins the parts of an edge, in the coordinates of the drawing. */
function routeOf(edge: Merged, laid: Map<number, ScopeLayout>, rects: Map<number, Rect>): Route {
  const points: Point[] = [];
  let at = { x: 0, y: 0 };
  for (const { scope, from, to, name } of edge.parts) {
    const inner = laid.get(scope)!;
    const outer = rects.get(scope)!;
    const found = inner.routes.get(segmentKey(from, to, name))!;
    const moved = found.points.map(({ x, y }) => ({ x: x + outer.x, y: y + outer.y }));
    moved[0] = ending(from, "out", scope, edge, laid, rects);
    moved[moved.length - 1] = ending(to, "in", scope, edge, laid, rects);
    if (typeof from === "number" && typeof to === "number") {
      at = { x: found.at.x + outer.x, y: found.at.y + outer.y };
      bendBack(moved, rects.get(from)!, rects.get(to)!);
    }
    points.push(...(points.length ? moved.slice(1) : moved));
  }
  const { source, target, onPath, text } = edge;
  return { source, target, onPath, points, text, at };
}

/** Returns where a part of an edge starts (`out`) or ends (`in`). */
function ending(
  end: End,
  side: "in" | "out",
  scope: number,
  edge: Merged,
  laid: Map<number, ScopeLayout>,
  rects: Map<number, Rect>,
): Point {
  if (typeof end !== "number") {
    const outer = rects.get(scope)!;
    return { x: outer.x + laid.get(scope)!.ports.get(end)!, y: side === "out" ? outer.y : outer.y + outer.h };
  }
  const box = rects.get(end)!;
  const ports = laid.get(end)?.ports;
  const x = ports?.get(`${side} ${edge.source}`) ?? ports?.get(`${side} shared`) ?? box.w / 2;
  return { x: box.x + x, y: side === "out" ? box.y + box.h : box.y };
}

/** Lets an edge that leads upwards, which closes a cycle, start at the top and end at the bottom. */
function bendBack(points: Point[], source: Rect, target: Rect): void {
  if (source.y + source.h <= target.y) return;
  points[0] = { x: points[0]!.x, y: source.y };
  points[points.length - 1] = { x: points.at(-1)!.x, y: target.y + target.h };
}

interface Merged {
  source: number;
  target: number;
  onPath: boolean;
  text: string;
  parts: { scope: number; from: End; to: End; name: string }[];
}

/** Returns the edges between visible boxes that are not open, each pair once. */
function mergeEdges(tree: Tree, visible: ReadonlySet<number>): Map<string, Merged> {
  const { edges, texts } = tree.graph;
  const shown = new Map<number, number>();
  const shownOf = (leaf: number): number => {
    let box = shown.get(leaf);
    if (box === undefined) {
      for (box = leaf; box !== ROOT && !visible.has(box);) box = tree.parents[box]!;
      shown.set(leaf, box);
    }
    return box;
  };
  const constants = new Set<number>();
  if (!tree.constants)
    tree.graph.classes.forEach((_, box) => hasClass(tree.graph, box, "constant") && constants.add(box));
  const found = new Map<string, Merged & { known: Set<number>; all: Set<number> }>();
  for (const [from, to, onPath, text] of edges) {
    if (constants.has(from) || constants.has(to)) continue;
    const source = shownOf(from);
    const target = shownOf(to);
    if (source === target || source === ROOT || target === ROOT) continue;
    const key = `${source} ${target}`;
    const edge = found.get(key) ?? {
      source,
      target,
      onPath: false,
      text: "",
      parts: [],
      known: new Set(),
      all: new Set(),
    };
    edge.onPath ||= Boolean(onPath);
    if (onPath) edge.known.add(text);
    edge.all.add(text);
    found.set(key, edge);
  }
  for (const edge of found.values()) {
    const [only, ...others] = edge.known.size ? edge.known : edge.all;
    // An element type alone says little, and covers much.
    if (!others.length && only !== undefined && only >= 0 && texts[only]!.endsWith("]")) edge.text = texts[only]!;
  }
  return found;
}

function boxHeight(tree: Tree, box: number): number {
  return LEAF_HEIGHT + (tree.graph.badges[box]!.length ? BADGE_HEIGHT : 0);
}

function boxWidth(tree: Tree, box: number, measure: Measure): number {
  const { classes, pills, rule, subtitles, badges, more } = tree.graph;
  const words = classes[box]!.split(" ");
  const mark = rule[box]! >= 0 ? MARK_WIDTH : 0;
  const first =
    measure(nameOf(tree.graph, box, tree.labels[box]!), LABEL_SIZE) +
    PILL_WIDTH * words.filter((word) => word in pills).length;
  const second = measure(subtitles[box]!, TEXT_SIZE);
  const third = badges[box]!.reduce((sum, [, text]) => sum + badgeWidth(text, measure) + 4, more[box] ? 14 : 0);
  return Math.ceil(Math.max(first + mark, second + mark, third, 30) + 2 * PAD);
}

/** Returns the first line of a box that is not open. */
export function nameOf(graph: GraphData, box: number, label: string): string {
  return graph.children[box]!.length ? `▸ ${label}` : label;
}

/** Returns the width of a badge. */
export function badgeWidth(text: string, measure: Measure): number {
  return measure(text, TEXT_SIZE) + 10;
}

/** Returns the SVG path of an edge: curves that are vertical at each point of the route. */
export function pathOf(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  if (!first) return "";
  const f = (value: number) => value.toFixed(1);
  const parts = [`M${f(first.x)},${f(first.y)}`];
  let { x, y } = first;
  for (const to of rest) {
    const half = (y + to.y) / 2;
    const straight = Math.abs(to.x - x) < 0.5;
    parts.push(straight ? `L${f(to.x)},${f(to.y)}` : `C${f(x)},${f(half)} ${f(to.x)},${f(half)} ${f(to.x)},${f(to.y)}`);
    ({ x, y } = to);
  }
  return parts.join(" ");
}

/**
 * Returns the scopes to open at first: as many as fit the window at full size, outer and interesting ones first.
 *
 * A scope that holds nearly the whole graph is opened in any case, because it alone shows nothing.
 */
export function initiallyOpen(tree: Tree, measure: Measure, width: number, height: number): Set<number> {
  const { interest } = tree.graph;
  let opened = new Set<number>();
  const fits = (scopes: Set<number>) => {
    if (tree.visible(scopes).length > 60) return false;
    const { width: w, height: h } = layoutGraph(tree, scopes, measure);
    return w <= width && h <= height;
  };
  const scopesIn = (box: number) => tree.children[box]!.filter((child) => tree.children[child]!.length);
  let pending = scopesIn(ROOT);
  const most = leafCount(tree, ROOT) * 0.8;
  for (let main = pending.find((box) => leafCount(tree, box) > most); main !== undefined;) {
    opened.add(main);
    pending = [...pending.filter((box) => box !== main), ...scopesIn(main)];
    if (tree.children[main]!.length > 3) break;
    main = pending.find((box) => leafCount(tree, box) > most);
  }
  for (let tries = 0; pending.length && tries < 12; tries += 1) {
    pending.sort((a, b) => tree.around(a).length - tree.around(b).length || interest[b]! - interest[a]! || a - b);
    const box = pending.shift()!;
    const more = new Set([...opened, box]);
    if (fits(more)) {
      opened = more;
      pending.push(...scopesIn(box));
    }
  }
  return opened;
}

function leafCount(tree: Tree, box: number): number {
  let count = 0;
  const pending = [box];
  while (pending.length) {
    const next = pending.pop()!;
    if (tree.children[next]!.length) pending.push(...tree.children[next]!);
    else count += 1;
  }
  return count;
}
