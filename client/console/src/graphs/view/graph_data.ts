/**
 * A graph to draw: boxes in a tree, and edges between its leaves. `gradrule._picture.page.data` writes it.
 *
 * Lists have one entry per box; box 0 is the whole graph.
 */
export interface GraphData {
  parents: number[];
  children: number[][];
  /** First line of text. */
  labels: string[];
  /** Full names. */
  titles: string[];
  /** Second line of text. */
  subtitles: string[];
  /** Words: `leaf` or `scope`, `path`, `x`, `y`, `wrong`, `rule`, `constant`, `off_path`, `not_differentiable`. */
  classes: string[];
  /** Index into `legend`; -1 for none. */
  rule: number[];
  /** Rules inside a scope, each with its mark and count. */
  badges: [rule: number, text: string][][];
  /** Whether a scope has more badges. */
  more: boolean[];
  /** Number of nodes with rules and of nodes on the path inside a box. */
  interest: number[];
  /** Source and target leaf, whether the edge is on the path, and the tensor's text as an index into `texts` or -1. */
  edges: [source: number, target: number, onPath: 0 | 1, text: number][];
  /** Facts about leaves as `name: value`, as indexes into `texts`. */
  details: Record<string, number[]>;
  texts: string[];
  legend: { mark: string; name: string; counts: string }[];
  /** Pairs of the pill that a line explains, or an empty text, and the line. */
  heading: [pill: string, line: string][];
  /** Classes of a sample in the legend, and what it means. */
  samples: [classes: string, line: string][];
  /** Colours of rules, which repeat, each with a text colour for it. */
  palette: [colour: string, text: string][];
  /** Characters of pills by class. */
  pills: Record<string, string>;
}

export const ROOT = 0;

/** Tells whether a box has a class. */
export function hasClass(graph: GraphData, box: number, word: string): boolean {
  return graph.classes[box]!.split(" ").includes(word);
}

/**
 * The tree of boxes to draw, with or without constants.
 *
 * Without constants, boxes that only constants and variables determine are left out, and a scope with one other box is
 * replaced by that box, under the scope's label.
 */
export class Tree {
  readonly parents: number[];
  readonly children: number[][];
  readonly labels: string[];

  constructor(
    readonly graph: GraphData,
    readonly constants: boolean,
  ) {
    this.parents = [...graph.parents];
    this.children = graph.children.map((group) => [...group]);
    this.labels = [...graph.labels];
    if (constants) return;
    const isConstant = graph.classes.map((_, box) => hasClass(graph, box, "constant"));
    for (const scope of [...this.outerFirst()].reverse()) {
      const kept: number[] = [];
      for (let child of this.children[scope]!) {
        const inside = this.children[child]!;
        if (inside.length === 1) {
          const only = inside[0]!;
          if (!hasClass(graph, only, "x") && !hasClass(graph, only, "y")) this.labels[only] = this.labels[child]!;
          child = only;
        }
        if (isConstant[child]) continue;
        this.parents[child] = scope;
        kept.push(child);
      }
      this.children[scope] = kept;
    }
  }

  /** Tells whether a box is drawn if all scopes around it are open. */
  has(box: number): boolean {
    for (; box !== ROOT; box = this.parents[box]!) {
      if (!this.children[this.parents[box]!]!.includes(box)) return false;
    }
    return true;
  }

  /** Returns the scopes around a box, inner ones first; all of them must be open to show the box. */
  around(box: number): number[] {
    const scopes = [];
    for (let scope = this.parents[box]!; scope !== ROOT; scope = this.parents[scope]!) scopes.push(scope);
    return scopes;
  }

  /** Returns the boxes that are visible with some scopes open: outer ones first, the open ones among them. */
  visible(opened: ReadonlySet<number>): number[] {
    const boxes: number[] = [];
    const pending = [...this.children[ROOT]!].reverse();
    while (pending.length) {
      const box = pending.pop()!;
      boxes.push(box);
      if (opened.has(box)) pending.push(...[...this.children[box]!].reverse());
    }
    return boxes;
  }

  /** Returns the open scopes after one was folded or unfolded. Folding a scope also folds the scopes inside. */
  toggled(opened: ReadonlySet<number>, box: number): Set<number> {
    if (!opened.has(box)) return new Set([...opened, box]);
    return new Set([...opened].filter((scope) => scope !== box && !this.around(scope).includes(box)));
  }

  private *outerFirst(): Iterable<number> {
    const pending = [ROOT];
    while (pending.length) {
      const box = pending.pop()!;
      if (!this.children[box]!.length) continue;
      yield box;
      pending.push(...this.children[box]!);
    }
  }
}

/** Returns at most `limit` boxes whose texts contain all words, nodes before scopes, in the order of the data flow. */
export function search(graph: GraphData, text: string, limit: number): number[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const leaves: number[] = [];
  const scopes: number[] = [];
  if (!words.length) return leaves;
  const pending = [...graph.children[ROOT]!].reverse();
  while (pending.length && leaves.length < limit) {
    const box = pending.pop()!;
    pending.push(...[...graph.children[box]!].reverse());
    const held = `${graph.labels[box]} ${graph.titles[box]} ${graph.subtitles[box]}`.toLowerCase();
    if (words.every((word) => held.includes(word))) (graph.children[box]!.length ? scopes : leaves).push(box);
  }
  return [...leaves, ...scopes].slice(0, limit);
}
