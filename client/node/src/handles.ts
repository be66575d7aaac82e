// Names and handles of tensors in a graph.

import { createError } from "./errors.js";
import type { Graph } from "./graph.js";
import { formatValue } from "./values.js";

/** An output of a node. Can be used as an input of other nodes and instead of a tensor name. */
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

/** Returns the names of one or several tensors. Throws UNKNOWN_TENSOR for a handle of another graph. */
export function tensorNames(names: Names | undefined, graph?: Graph): string[] {
  if (names === undefined) return [];
  return (isMany(names) ? names : [names]).map((name) => tensorName(name, graph));
}

/** Returns the name of a tensor. Throws UNKNOWN_TENSOR for a handle of another graph. */
export function tensorName(name: Name, graph: Graph | undefined): string {
  if (typeof name === "string") return name;
  if (!(name instanceof Output)) {
    throw createError("UNKNOWN_TENSOR", `A tensor is named by a string or a handle, not by ${formatValue(name)}.`);
  }
  if (graph !== undefined && name.graph !== graph) {
    throw createError("UNKNOWN_TENSOR", `The handle ${name.name} belongs to another graph.`);
  }
  return name.name;
}

function isMany(names: Names): names is readonly Name[] {
  return Array.isArray(names);
}
