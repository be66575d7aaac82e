// What to compute, in the words of the caller, as the messages that say it.

import type { MessageInitShape } from "@bufbuild/protobuf";

import type { DType } from "./dtypes.js";
import { GradruleError, errorOf } from "./errors.js";
import type { ParamValuesSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import { NoGradient, UnconnectedGradients } from "./gen/gradrule/v1/program_pb.js";
import type { ProgramSpecSchema } from "./gen/gradrule/v1/program_pb.js";
import type { NamedTensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import { Output } from "./graph.js";
import type { Graph } from "./graph.js";
import { bare } from "./names.js";
import { overrideMessages } from "./overrides.js";
import type { Overrides } from "./overrides.js";
import { paramValues } from "./rules.js";
import type { Params } from "./rules.js";
import { Tensor, tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { namedTensor } from "./wire.js";

/** A tensor of a graph: its name (`y` is `y:0`) or its handle. */
export type Name = string | Output;

/** One tensor of a graph, or several. */
export type Names = Name | readonly Name[];

/** Tensors by name; a Map may have handles as keys. */
export type Feeds = Readonly<Record<string, TensorLike>> | ReadonlyMap<Name, TensorLike>;

/** An upstream gradient: a value, or the name or handle of a tensor of the graph; null for ones. */
export type GradY = TensorLike | Output | null;

/** Upstream gradients by y, or in the order of ys. */
export type GradYs = Readonly<Record<string, GradY>> | ReadonlyMap<Name, GradY> | readonly GradY[];

/** What to compute, in the words of `tf.gradients` and `Session.run`. */
export interface SpecOptions {
  /** Tensors to put out. */
  readonly fetches?: Names;
  /** What is differentiated. */
  readonly ys?: Names;
  /** With respect to what. */
  readonly xs?: Names;
  /** Tensors that count as constants. */
  readonly stopGradients?: Names;
  /** What a gradient is where y does not depend on x: null or zeros. Default: `none`. */
  readonly unconnectedGradients?: "none" | "zero";
  readonly overrides?: Overrides;
  /** What to do with an op on the path that has no gradient. Default, and so far all there is: `error`. */
  readonly noGradient?: "error";
}

/** Param values by the label of an override. */
export type CallParams = Readonly<Record<string, Params>>;

/** Element type of a tensor by its name; undefined where only the server knows. */
export type DTypeOf = (name: string) => DType | undefined;

type Entries<T> = readonly (readonly [string, T])[];

/** Upstream gradients by y: those in the graph belong to the program, values to the call. */
export interface SplitGradYs {
  readonly inGraph: Entries<string>;
  readonly values: Entries<TensorLike>;
}

/** The names of one tensor or several. Throws UNKNOWN_TENSOR for a handle of another graph. */
export function namesOf(names: Names | undefined, graph?: Graph): string[] {
  if (names === undefined) return [];
  return (isMany(names) ? names : [names]).map((name) => nameOf(name, graph));
}

function isMany(names: Names): names is readonly Name[] {
  return Array.isArray(names);
}

function nameOf(name: Name, graph: Graph | undefined): string {
  if (typeof name === "string") return name;
  if (!(name instanceof Output)) {
    throw errorOf("UNKNOWN_TENSOR", `A tensor is named by a string or a handle, not by ${JSON.stringify(name)}.`);
  }
  if (graph !== undefined && name.graph !== graph) {
    throw errorOf("UNKNOWN_TENSOR", `The handle ${name.name} belongs to another graph.`);
  }
  return name.name;
}

/** Sorts upstream gradients by where they come from. Throws INVALID_DERIVATIVE where they do not fit the ys. */
export function splitGradYs(gradYs: GradYs | undefined, ys: readonly string[], graph?: Graph): SplitGradYs {
  const inGraph: [string, string][] = [];
  const values: [string, TensorLike][] = [];
  for (const [y, value] of gradYEntries(gradYs ?? {}, ys, graph)) {
    if (value instanceof Output || typeof value === "string") inGraph.push([y, nameOf(value, graph)]);
    else if (value !== null) values.push([y, value]);
  }
  return { inGraph, values };
}

function gradYEntries(gradYs: GradYs, ys: readonly string[], graph: Graph | undefined): Entries<GradY> {
  if (Array.isArray(gradYs)) {
    const list = gradYs as readonly GradY[];
    if (list.length === ys.length) return list.map((value, index) => [ys[index]!, value]);
    throw errorOf("INVALID_DERIVATIVE", `gradYs has ${list.length} entries for ${ys.length} ys; null stands for ones.`);
  }
  const byName = entriesOf(gradYs as Exclude<GradYs, readonly GradY[]>, graph);
  return byName.map(([name, value]) => {
    const y = ys.find((known) => bare(known) === bare(name));
    if (y !== undefined) return [y, value];
    throw errorOf("INVALID_DERIVATIVE", `gradYs has ${name}, which is none of the ys: ${ys.join(", ") || "none"}.`);
  });
}

function entriesOf<T>(
  values: Readonly<Record<string, T>> | ReadonlyMap<Name, T>,
  graph: Graph | undefined,
): Entries<T> {
  if (!(values instanceof Map)) return Object.entries(values as Readonly<Record<string, T>>);
  return [...(values as ReadonlyMap<Name, T>)].map(([name, value]) => [nameOf(name, graph), value]);
}

/** The message of a program. Throws UNKNOWN_TENSOR, INVALID_DERIVATIVE, UNSUPPORTED. */
export function specMessage(
  graph: Graph,
  options: SpecOptions,
  { inGraph, values }: SplitGradYs,
): MessageInitShape<typeof ProgramSpecSchema> {
  if ((options.noGradient ?? "error") !== "error") {
    throw errorOf("UNSUPPORTED", `noGradient is "error"; ${JSON.stringify(options.noGradient)} is not there yet.`);
  }
  const vjp = {
    ys: namesOf(options.ys, graph),
    xs: namesOf(options.xs, graph),
    gradYs: inGraph.map(([y, name]) => ({ y, tensor: name })),
    stopGradients: namesOf(options.stopGradients, graph),
    unconnectedGradients: unconnected(options.unconnectedGradients ?? "none"),
  };
  const parts = [vjp.ys, vjp.xs, vjp.gradYs, vjp.stopGradients, values];
  const differentiates = parts.some((part) => part.length > 0);
  // With nothing to differentiate, what the builder recorded has no meaning, and would be refused.
  const recorded = differentiates ? graph.nodeOverrides : [];
  return {
    graph: { source: { case: "serialized", value: graph.toBytes() } },
    overrides: [...overrideMessages(options.overrides ?? []), ...overrideMessages(recorded)],
    fetches: namesOf(options.fetches, graph),
    derivative: differentiates ? { case: "vjp", value: vjp } : { case: undefined },
    noGradient: NoGradient.ERROR,
  };
}

function unconnected(word: "none" | "zero"): UnconnectedGradients {
  if (word === "none") return UnconnectedGradients.NONE;
  if (word === "zero") return UnconnectedGradients.ZERO;
  throw errorOf("INVALID_DERIVATIVE", `unconnectedGradients is "none" or "zero", not ${JSON.stringify(word)}.`);
}

/** The messages of feeds. */
export function feedMessages(
  feeds: Feeds,
  dtypeOf: DTypeOf,
  graph?: Graph,
): MessageInitShape<typeof NamedTensorSchema>[] {
  return namedTensors(entriesOf(feeds, graph), dtypeOf, "feeds");
}

/** The messages of tensors by name. Nested arrays take the type that `dtypeOf` tells. Throws INVALID_TENSOR. */
export function namedTensors(
  values: Entries<TensorLike>,
  dtypeOf: DTypeOf,
  what: string,
): MessageInitShape<typeof NamedTensorSchema>[] {
  return values.map(([name, value]) => {
    try {
      return namedTensor(name, asTensor(value, dtypeOf(name)));
    } catch (cause) {
      if (!(cause instanceof GradruleError)) throw cause;
      throw errorOf(cause.reason, `${what}.${name}: ${cause.message}`);
    }
  });
}

/** Typed arrays and tensors have a type of their own, which the server compares; lists take the tensor's. */
function asTensor(value: TensorLike, dtype: DType | undefined): Tensor {
  const typed = value instanceof Tensor || (ArrayBuffer.isView(value) && dtype !== "string");
  return tensor(value, typed || dtype === undefined ? {} : { dtype });
}

/** The messages of params by label. */
export function callParams(params: CallParams | undefined): Record<string, MessageInitShape<typeof ParamValuesSchema>> {
  const labels = Object.entries(params ?? {});
  return Object.fromEntries(labels.map(([label, values]) => [label, { values: paramValues(values) }]));
}
