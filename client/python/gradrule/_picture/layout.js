"use strict";
// Computes the positions of boxes and the routes of edges for a folding state, like `placing.py` for the SVG file, with
// the same names. `view` holds lists by box; box 0 is the whole graph. This file does not access the document.
const layout = (() => {
  const GAP = 18, ROW_GAP = 34, PAD = 14, HEAD = 24, BEND = 8, ROOT = 0;

  const leavingBend = (box) => -2 * box - 1;
  const enteringBend = (box) => -2 * box - 2;
  const itemBox = (item) => (item >= 0 ? item : Math.floor((-item - 1) / 2));
  const sourceKey = (item) => (item === enteringBend(itemBox(item)) ? item : itemBox(item));
  const bendKey = (scope, number, item) => `${scope} ${number} ${item}`;

  // Returns rectangles by box, top and bottom of rows by open scope, and middles of bends. `opened`: a set of scopes.
  function place(view, opened) {
    const order = [ROOT];
    for (const box of order) order.push(...view.children[box].filter((child) => opened.has(child)));
    const layouts = new Map();
    for (const box of [...order].reverse()) layouts.set(box, scopeLayout(view, box, layouts));
    const rects = new Map(), bands = new Map(), bends = new Map();
    rects.set(ROOT, { x: 0, y: 0, w: layouts.get(ROOT).w, h: layouts.get(ROOT).h });
    for (const box of order) {
      const inner = layouts.get(box), at = rects.get(box);
      bands.set(box, inner.bands.map(([top, bottom]) => [at.y + top, at.y + bottom]));
      view.rows[box].forEach((row, number) => {
        const top = bands.get(box)[number][0];
        row.forEach((item, index) => {
          const [w, h] = sizeOf(view, item, layouts), x = at.x + inner.lefts[number][index];
          if (item < 0) bends.set(bendKey(box, number, item), x + w / 2);
          else rects.set(item, { x, y: top, w, h });
        });
      });
    }
    return { rects, bands, bends };
  }

  function sizeOf(view, item, layouts) {
    if (item < 0) return [BEND, 0];
    const inner = layouts.get(item);
    return inner === undefined ? [view.widths[item], view.heights[item]] : [inner.w, inner.h];
  }

  function scopeLayout(view, box, layouts) {
    const middles = new Map(), lefts = [], bands = [], widths = [];
    let y = box === ROOT ? PAD : HEAD;
    for (const row of view.rows[box]) {
      const sizes = row.map((item) => sizeOf(view, item, layouts));
      const xs = leftPositions(sizes.map(([w]) => w), row.map((item) => targetMiddle(view, item, middles)));
      const height = sizes.reduce((most, [, h]) => Math.max(most, h), 0);
      row.forEach((item, index) => middles.set(sourceKey(item), xs[index] + sizes[index][0] / 2));
      lefts.push(xs);
      widths.push(sizes.map(([w]) => w));
      bands.push([y, y + height]);
      y += height + ROW_GAP;
    }
    let left = Infinity, right = 0;
    for (const xs of lefts) for (const x of xs) left = Math.min(left, x);
    if (left === Infinity) left = 0;
    lefts.forEach((xs, number) => {
      xs.forEach((x, index) => { right = Math.max(right, x - left + widths[number][index]); });
    });
    right = Math.max(right, view.widths[box] - 2 * PAD);
    const moved = lefts.map((xs) => xs.map((x) => x - left + PAD));
    return { w: right + 2 * PAD, h: y - ROW_GAP + PAD, lefts: moved, bands };
  }

  function targetMiddle(view, item, middles) {
    const sources = item < 0 ? [sourceKey(item)] : [...(view.before[item] || []), enteringBend(item)];
    const known = sources.filter((source) => middles.has(source)).map((source) => middles.get(source));
    return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  }

  function leftPositions(widths, targets) {
    const plain = [];
    let x = 0;
    for (const w of widths) {
      plain.push(x);
      x += w + GAP;
    }
    const shifts = targets.map((target, index) => (target === null ? null : target - widths[index] / 2 - plain[index]));
    const first = shifts.find((each) => each !== null);
    let shift = first === undefined ? -(x - GAP) / 2 : first;
    let end = null;
    const lefts = plain.map((at, index) => {
      if (shifts[index] !== null) shift = shifts[index];
      const left = end === null ? at + shift : Math.max(at + shift, end + GAP);
      end = left + widths[index];
      return left;
    });
    const off = [];
    targets.forEach((target, index) => { if (target !== null) off.push(target - widths[index] / 2 - lefts[index]); });
    const moved = off.length ? off.reduce((sum, each) => sum + each, 0) / off.length : 0;
    return lefts.map((left) => left + moved);
  }

  // Returns the edges between visible boxes, each pair once; edges off the path come first.
  function routes(view, placed) {
    const shown = new Map(), found = new Map();
    const shownOf = (leaf) => {
      let box = shown.get(leaf);
      if (box === undefined) {
        for (box = leaf; !placed.rects.has(box);) box = view.parents[box];
        shown.set(leaf, box);
      }
      return box;
    };
    for (const [sourceLeaf, targetLeaf, onPath] of view.edges) {
      const source = shownOf(sourceLeaf), target = shownOf(targetLeaf);
      if (source === target) continue;
      const key = source * view.parents.length + target, known = found.get(key);
      if (known === undefined) found.set(key, { source, target, onPath: Boolean(onPath) });
      else known.onPath = known.onPath || Boolean(onPath);
    }
    const drawn = [...found.values()];
    for (const route of drawn) route.points = wayOf(view, placed, route.source, route.target);
    return [...drawn.filter((route) => !route.onPath), ...drawn.filter((route) => route.onPath)];
  }

  function wayOf(view, placed, source, target) {
    const [scope, upper, lower] = meeting(view, source, target);
    if (view.row[upper] >= view.row[lower]) return [];
    const a = placed.rects.get(source), b = placed.rects.get(target);
    const points = [[a.x + a.w / 2, a.y + a.h]];
    const down = (home, item, start, end) => {
      for (let number = start; number < end; number += 1) {
        const middle = placed.bends.get(bendKey(home, number, item));
        if (middle === undefined) continue;
        const [top, bottom] = placed.bands.get(home)[number];
        points.push([middle, top], [middle, bottom]);
      }
    };
    for (const box of between(view, source, upper)) {
      const parent = view.parents[box], bands = placed.bands.get(parent);
      points.push([points[points.length - 1][0], bands[view.row[box]][1]]);
      down(parent, leavingBend(box), view.row[box] + 1, box === upper ? view.row[lower] : bands.length);
    }
    for (const box of between(view, target, lower).reverse()) {
      if (box !== lower) down(view.parents[box], enteringBend(box), 0, view.row[box]);
    }
    points.push([b.x + b.w / 2, b.y]);
    return points;
  }

  function between(view, box, outer) {
    const boxes = [box];
    while (boxes[boxes.length - 1] !== outer) boxes.push(view.parents[boxes[boxes.length - 1]]);
    return boxes;
  }

  function meeting(view, source, target) {
    let a = source, b = target;
    while (view.parents[a] !== view.parents[b]) {
      if (view.depths[a] >= view.depths[b]) a = view.parents[a];
      else b = view.parents[b];
    }
    return [view.parents[a], a, b];
  }

  // Returns the SVG path of an edge: straight along boxes, curved between rows, upwards around the right side.
  function pathOf(route, source, target) {
    const f = (value) => value.toFixed(1);
    if (!route.points.length) {
      const x = source.x + source.w, y = source.y + source.h / 2;
      const to = target.x + target.w, end = target.y + target.h / 2, out = Math.max(x, to) + 40;
      return `M${f(x)},${f(y)} C${f(out)},${f(y)} ${f(out)},${f(end)} ${f(to)},${f(end)}`;
    }
    let [x, y] = route.points[0];
    const parts = [`M${f(x)},${f(y)}`];
    for (const [to, end] of route.points.slice(1)) {
      const half = (y + end) / 2;
      parts.push(to === x ? `V${f(end)}` : `C${f(x)},${f(half)} ${f(to)},${f(half)} ${f(to)},${f(end)}`);
      [x, y] = [to, end];
    }
    return parts.join(" ");
  }

  // Returns the scopes around a box; all of them must be open to show the box.
  function around(view, box) {
    const scopes = [];
    for (let scope = view.parents[box]; scope !== ROOT; scope = view.parents[scope]) scopes.push(scope);
    return scopes;
  }

  // Returns the open scopes after one was folded or unfolded. Folding a scope also folds the scopes inside.
  function toggled(view, opened, box) {
    if (!opened.has(box)) return new Set([...opened, box]);
    return new Set([...opened].filter((scope) => scope !== box && !around(view, scope).includes(box)));
  }

  // Returns at most `limit` boxes whose texts contain all words, nodes before scopes.
  function search(view, text, limit) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    if (!words.length) return found;
    const reached = [ROOT], seen = [];
    while (reached.length) {
      const box = reached.pop();
      if (box !== ROOT) seen.push(box);
      for (let index = view.children[box].length - 1; index >= 0; index -= 1) reached.push(view.children[box][index]);
    }
    for (const isLeaf of [true, false]) {
      for (const box of seen) {
        if ((view.children[box].length === 0) !== isLeaf) continue;
        const held = `${view.titles[box]} ${view.subtitles[box]}`.toLowerCase();
        if (words.every((word) => held.includes(word))) found.push(box);
        if (found.length === limit) return found;
      }
    }
    return found;
  }

  return { place, routes, pathOf, around, toggled, search };
})();
