import { expect, test } from "@playwright/test";
import { fitted, neighbour, opening, revealed, zoomed } from "../src/graphs/view/camera";
import { type GraphData, search, Tree } from "../src/graphs/view/graph_data";
import {
  initiallyOpen,
  layoutGraph,
  type Layout,
  MAX_BOXES,
  type Rect,
  type Route,
} from "../src/graphs/view/graph_layout";
import { readGraph, writePages } from "./explain_pages";

const measure = (text: string, size: number) => text.length * size * 0.6;
let folder: string;
test.beforeAll(() => {
  folder = writePages();
});

/** Returns the scopes of a tree to open one after another, outer ones first, until `most` boxes are visible. */
function outerScopes(tree: Tree, most: number): Set<number> {
  const opened = new Set<number>();
  const pending = [...tree.children[0]!];
  for (let box = pending.shift(); box !== undefined; box = pending.shift()) {
    if (!tree.children[box]!.length) continue;
    opened.add(box);
    if (tree.visible(opened).length > most) {
      opened.delete(box);
      break;
    }
    pending.push(...tree.children[box]!);
  }
  return opened;
}

/** Returns points on the curve of an edge, close to each other. */
function along({ points }: Route): { x: number; y: number }[] {
  return points.slice(1).flatMap((to, index) => {
    const from = points[index]!;
    return Array.from({ length: 101 }, (_, step) => {
      const t = step / 100;
      // A cubic curve that is vertical at both ends, as `pathOf` draws it.
      const share = t * t * (3 - 2 * t);
      const half = 1.5 * t * (1 - t) + t ** 3;
      return { x: from.x + share * (to.x - from.x), y: from.y + half * (to.y - from.y) };
    });
  });
}

const inside = (inner: Rect, outer: Rect) =>
  inner.x >= outer.x - 0.01 &&
  inner.y >= outer.y - 0.01 &&
  inner.x + inner.w <= outer.x + outer.w + 0.01 &&
  inner.y + inner.h <= outer.y + outer.h + 0.01;

function overlap(one: Rect, other: Rect): boolean {
  return one.x < other.x + other.w && other.x < one.x + one.w && one.y < other.y + other.h && other.y < one.y + one.h;
}

function expectTidy(tree: Tree, layout: Layout): void {
  const rects = new Map(layout.boxes.map((at) => [at.box, at]));
  for (const at of layout.boxes) {
    const outer = rects.get(tree.parents[at.box]!);
    if (outer) expect(inside(at, { ...outer, y: outer.y + 20, h: outer.h - 20 })).toBe(true);
    const isNested = (one: number, other: number) => tree.around(one).includes(other);
    const covered = layout.boxes.filter(
      (other) =>
        at.box < other.box && overlap(at, other) && !isNested(at.box, other.box) && !isNested(other.box, at.box),
    );
    expect(covered, at.label).toEqual([]);
  }
  for (const { source, target, points } of layout.routes) {
    const [from, to] = [rects.get(source)!, rects.get(target)!];
    expect(points[0]!.x).toBeGreaterThanOrEqual(from.x);
    expect(points[0]!.x).toBeLessThanOrEqual(from.x + from.w);
    expect([from.y, from.y + from.h]).toContainEqual(points[0]!.y);
    expect([to.y, to.y + to.h]).toContainEqual(points.at(-1)!.y);
    expect(points.filter(({ x, y }) => !(x >= 0 && x <= layout.width && y <= layout.height))).toEqual([]);
  }
}

for (const name of ["nested", "layered", "large"]) {
  test(`boxes of ${name} do not overlap, are inside their scope, and edges connect them`, () => {
    const graph = readGraph(folder, name);
    for (const constants of [true, false]) {
      const tree = new Tree(graph, constants);
      for (const opened of [new Set<number>(), initiallyOpen(tree, measure, 1000, 700), outerScopes(tree, 100)]) {
        const layout = layoutGraph(tree, opened, measure);
        expect(layout.boxes.map(({ box }) => box)).toEqual(tree.visible(opened));
        expectTidy(tree, layout);
      }
    }
  });
}

test("edges go down except those that close a cycle, and do not cross other boxes in a chain", () => {
  const tree = new Tree(readGraph(folder, "layered"), false);
  const { boxes, routes } = layoutGraph(tree, outerScopes(tree, 200), measure);
  const rects = new Map(boxes.map((at) => [at.box, at]));
  expect(routes.length).toBeGreaterThan(20);
  for (const { source, target, points } of routes) {
    expect(rects.get(source)!.y + rects.get(source)!.h).toBeLessThan(rects.get(target)!.y);
    for (let index = 1; index < points.length; index += 1) {
      expect(points[index]!.y).toBeGreaterThanOrEqual(points[index - 1]!.y - 0.01);
    }
  }
});

test("an edge between folded scopes stands for all edges between their nodes", () => {
  const graph = readGraph(folder, "nested");
  const tree = new Tree(graph, true);
  const { routes } = layoutGraph(tree, new Set(), measure);
  const title = (box: number) => graph.titles[box];
  expect(routes.map(({ source, target }) => `${title(source)} ${title(target)}`).sort()).toEqual(
    [
      "x block",
      "x pred",
      "x aside",
      "x stop",
      "start loop",
      "start pred",
      "block loop",
      "loop if",
      "pred if",
      "if y",
      "stop y",
    ].sort(),
  );
  expect(routes.filter(({ onPath }) => onPath).map(({ source }) => title(source))).toContain("loop");
});

test("texts of edges are beside their edge, inside their scope, and cover no box", () => {
  for (const name of ["nested", "layered"]) {
    const tree = new Tree(readGraph(folder, name), true);
    // Every edge gets a text: shapes differ from graph to graph.
    tree.graph.edges.forEach((edge) => (edge[3] = 0));
    tree.graph.texts[0] = "float32 [?, 224, 224, 3]";
    const { boxes, routes, width } = layoutGraph(tree, outerScopes(tree, 60), measure);
    const texts = routes.filter(({ text }) => text);
    expect(texts.length).toBeGreaterThan(8);
    for (const route of texts) {
      const [w, h] = [measure(route.text, 12), 12];
      const at = { x: route.at.x - w / 2, y: route.at.y - h / 2, w, h };
      expect(at.x + w).toBeLessThanOrEqual(width);
      expect(boxes.filter((box) => !box.open && overlap(at, box))).toEqual([]);
      const drawn = along(route);
      expect(drawn.filter(({ x, y }) => overlap(at, { x, y, w: 0, h: 0 }))).toEqual([]);
      expect(drawn.some(({ x, y }) => Math.abs(y - route.at.y) < 4 && at.x - x < 12)).toBe(true);
    }
  }
});

test("no edge that enters an open scope at its top crosses the scope's label", () => {
  let entering = 0;
  for (const name of ["nested", "layered"]) {
    const tree = new Tree(readGraph(folder, name), true);
    const { boxes, routes } = layoutGraph(tree, outerScopes(tree, 60), measure);
    for (const scope of boxes.filter(({ open }) => open)) {
      const start = scope.x + scope.labelAt;
      const end = start + measure(`▾ ${scope.label}`, 13);
      expect(end).toBeLessThanOrEqual(scope.x + scope.w);
      const isAtTop = ({ x, y }: { x: number; y: number }) => y === scope.y && x >= scope.x && x <= scope.x + scope.w;
      const entries = routes.flatMap(({ points }) => points.filter(isAtTop));
      entering += entries.length;
      expect(
        entries.filter(({ x }) => x > start - 4 && x < end + 4),
        scope.label,
      ).toEqual([]);
    }
  }
  expect(entering).toBeGreaterThan(6);
});

test("shapes are on the edges of which they are known", () => {
  const tree = new Tree(readGraph(folder, "layered"), false);
  const texts = layoutGraph(tree, new Set(), measure).routes.map(({ text }) => text);
  expect(texts.filter(Boolean)).toEqual(["float32 [?, 8]"]);
});

test("a graph opens as far as it fits, and completely if it is tiny", () => {
  const layered = new Tree(readGraph(folder, "layered"), false);
  const opened = initiallyOpen(layered, measure, 900, 600);
  const { width, height } = layoutGraph(layered, opened, measure);
  expect(width <= 900 && height <= 600).toBe(true);
  expect(layered.children[0]!.map((box) => layered.labels[box])).toEqual([
    "keras_tensor",
    "conv1",
    "conv2",
    "head",
    "predictions",
  ]);
  const nested = new Tree(readGraph(folder, "nested"), true);
  const scopes = nested.graph.children.flatMap((children, box) => (box && children.length ? [box] : []));
  expect([...initiallyOpen(nested, measure, 3000, 3000)].sort()).toEqual(scopes.sort());
});

test("a graph of twenty thousand nodes starts with few boxes, and three hundred are laid out", () => {
  const tree = new Tree(readGraph(folder, "large"), false);
  expect(tree.visible(initiallyOpen(tree, measure, 1000, 700)).length).toBeLessThanOrEqual(60);
  const many = layoutGraph(tree, outerScopes(tree, MAX_BOXES), measure);
  expect(many.boxes.length).toBeGreaterThan(200);
});

test("search finds nodes by all words, nodes before scopes, in the order of the data flow", () => {
  const graph = readGraph(folder, "layered");
  const titles = (text: string, limit = 100) => search(graph, text, limit).map((box) => graph.titles[box]);
  expect(titles("conv1_block2 relu")).toEqual([1, 2, 3, 4].map((number) => `conv1_block2_${number}_relu/Relu`));
  expect(titles("GUIDED_RELU", 3)).toHaveLength(3);
  expect(titles("predictions")).toEqual(["Identity"]);
  expect(titles("  ")).toEqual([]);
  expect(titles("no such node")).toEqual([]);
});

test("folding a scope folds the scopes inside", () => {
  const tree = new Tree(readGraph(folder, "nested"), true);
  const named = (title: string) => tree.graph.titles.indexOf(title);
  const opened = new Set([named("block"), tree.children[named("block")]!.find((box) => tree.children[box]!.length)!]);
  expect(tree.toggled(opened, named("block"))).toEqual(new Set());
  expect(tree.toggled(new Set(), named("block"))).toEqual(new Set([named("block")]));
});

test("a cycle of edges is drawn", () => {
  const graph = readGraph(folder, "nested");
  const cyclic: GraphData = {
    ...graph,
    edges: [...graph.edges, ...graph.edges.map(([a, b, c, d]) => [b, a, c, d] as (typeof graph.edges)[0])],
  };
  const tree = new Tree(cyclic, true);
  const layout = layoutGraph(tree, new Set(tree.children[0]!.filter((box) => tree.children[box]!.length)), measure);
  expect(layout.boxes.length).toBeGreaterThan(10);
  for (const { points } of layout.routes) for (const { x, y } of points) expect(Number.isFinite(x + y)).toBe(true);
});

test("the camera keeps the zoomed point, fits, and shows what is outside", () => {
  const before = { x: 10, y: 20, k: 0.5 };
  const after = zoomed(before, 1.7, 300, 200);
  expect((300 - after.x) / after.k).toBeCloseTo((300 - before.x) / before.k);
  expect((200 - after.y) / after.k).toBeCloseTo((200 - before.y) / before.k);
  expect(fitted({ width: 2000, height: 500 }, { width: 1000, height: 1000 })).toEqual({ x: 0, y: 375, k: 0.5 });
  expect(opening({ width: 2000, height: 9000 }, { width: 1000, height: 800 }, 0).k * 13).toBeGreaterThanOrEqual(12);
  expect(revealed({ x: 0, y: 0, k: 1 }, { x: 1100, y: 0, w: 100, h: 40 }, { width: 1000, height: 800 })).toMatchObject({
    x: -208,
    y: 8,
  });
});

test("arrow keys lead to the nearest box in a direction", () => {
  const at = (x: number, y: number) => ({ x, y, w: 100, h: 40 });
  const boxes = [at(0, 0), at(0, 100), at(200, 100), at(0, 300)];
  expect(neighbour(boxes, boxes[0]!, "ArrowDown")).toBe(boxes[1]);
  expect(neighbour(boxes, boxes[1]!, "ArrowRight")).toBe(boxes[2]);
  expect(neighbour(boxes, boxes[0]!, "ArrowUp")).toBeUndefined();
});

test("arrow keys reach every box", () => {
  for (const name of ["nested", "layered"]) {
    const tree = new Tree(readGraph(folder, name), true);
    const { boxes } = layoutGraph(tree, outerScopes(tree, 60), measure);
    const reached = new Set([boxes[0]!]);
    for (const at of reached) {
      for (const key of ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"] as const) {
        const next = neighbour(boxes, at, key);
        if (next) reached.add(next);
      }
    }
    expect(boxes.filter((at) => !reached.has(at)).map(({ label }) => label)).toEqual([]);
  }
});
