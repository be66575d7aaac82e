// Tensors of a graph, by name or by handle.

import { errorOf } from "./errors.js";
import type { Graph } from "./graph.js";
import { shown } from "./values.js";

/** An output of a node, for use as an input of others and wherever a tensor is named. */
export class Output {
  constructor(
    readonly graph: Graph,
    readonly node: string,
    readonly index: number,
  ) {}

  /** Name in the graph: `node`, or `node:index` for outputs after the first. */
  get name(): string {
    return this.index === 0 ? this.node : `${this.node}:${this.index}`;
  }

  toString(): string {
    return this.name;
  }
}

/** A tensor of a graph: its name (`y` is `y:0`) or its handle. */
export type Name = string | Output;

/** One tensor of a graph, or several. */
export type Names = Name | readonly Name[];

/** The names of one tensor or several. Throws UNKNOWN_TENSOR for a handle of another graph. */
export function namesOf(names: Names | undefined, graph?: Graph): string[] {
  if (names === undefined) return [];
  return (isMany(names) ? names : [names]).map((name) => nameOf(name, graph));
}

/** The name of a tensor. Throws UNKNOWN_TENSOR for a handle of another graph. */
export function nameOf(name: Name, graph: Graph | undefined): string {
  if (typeof name === "string") return name;
  if (!(name instanceof Output)) {
    throw errorOf("UNKNOWN_TENSOR", `A tensor is named by a string or a handle, not by ${shown(name)}.`);
  }
  if (graph !== undefined && name.graph !== graph) {
    throw errorOf("UNKNOWN_TENSOR", `The handle ${name.name} belongs to another graph.`);
  }
  return name.name;
}

function isMany(names: Names): names is readonly Name[] {
  return Array.isArray(names);
}
