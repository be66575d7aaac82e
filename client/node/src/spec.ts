// What to compute, in the words of the caller, as the messages that say it.

import type { MessageInitShape } from "@bufbuild/protobuf";

import type { DType } from "./dtypes.js";
import { GradruleError, errorOf } from "./errors.js";
import type { ParamValuesSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import { Jit, NoGradient, UnconnectedGradients } from "./gen/gradrule/v1/program_pb.js";
import type { ProgramSpecSchema } from "./gen/gradrule/v1/program_pb.js";
import type { NamedTensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import type { Graph } from "./graph.js";
import { Output, nameOf, namesOf } from "./handles.js";
import type { Name, Names } from "./handles.js";
import { bare } from "./names.js";
import { overrideMessages } from "./overrides.js";
import type { Overrides } from "./overrides.js";
import { paramValues } from "./rules.js";
import type { Params } from "./rules.js";
import { Tensor, tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { isRecord, oneOf, shown } from "./values.js";
import { namedTensor } from "./wire.js";

/** Tensors by name; a Map may have handles as keys. */
export type Feeds = Readonly<Record<string, TensorLike>> | ReadonlyMap<Name, TensorLike>;

/** An upstream gradient: a value, or the name or handle of a tensor of the graph; null for ones. */
export type GradY = TensorLike | Output | null;

/** Upstream gradients by y, or in the order of ys. */
export type GradYs = Readonly<Record<string, GradY>> | ReadonlyMap<Name, GradY> | readonly GradY[];

const UNCONNECTED = { none: UnconnectedGradients.NONE, zero: UnconnectedGradients.ZERO } as const;

const NO_GRADIENT = {
  error: NoGradient.ERROR,
  default: NoGradient.DEFAULT,
  pass: NoGradient.PASS,
  zero: NoGradient.ZERO,
} as const;

// The default is not written, so that equal programs have equal bytes.
const JIT = { off: Jit.UNSPECIFIED, auto: Jit.AUTO } as const;

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
  readonly unconnectedGradients?: keyof typeof UNCONNECTED;
  readonly overrides?: Overrides;
  /**
   * What an op on the path does that has no gradient and no override: `error` refuses (the default), `default` does as
   * TensorFlow does, `pass` hands the upstream gradient on, `zero` gives zeros.
   */
  readonly noGradient?: keyof typeof NO_GRADIENT;
  /** Changes to the graph before overrides are resolved: `fold_batch_norm` folds batch norms into linear ops. */
  readonly rewrites?: string | readonly string[];
  /**
   * `auto` lets XLA compute calls of a program that runs often, where it is faster and comes to the same up to
   * rounding. Default: `off`.
   */
  readonly jit?: keyof typeof JIT;
  /** Whether the server may run calls of the program together, where it has proven that no answer changes. Default: true. */
  readonly batching?: boolean;
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

/** The message of a program. Throws UNKNOWN_TENSOR, INVALID_DERIVATIVE, INVALID_OVERRIDE, UNSUPPORTED. */
export function specMessage(
  graph: Graph,
  options: SpecOptions,
  { inGraph, values }: SplitGradYs,
): MessageInitShape<typeof ProgramSpecSchema> {
  const vjp = {
    ys: namesOf(options.ys, graph),
    xs: namesOf(options.xs, graph),
    gradYs: inGraph.map(([y, name]) => ({ y, tensor: name })),
    stopGradients: namesOf(options.stopGradients, graph),
    unconnectedGradients: chosen(options.unconnectedGradients ?? "none", UNCONNECTED, "unconnectedGradients"),
  };
  const parts = [vjp.ys, vjp.xs, vjp.gradYs, vjp.stopGradients, values];
  const differentiates = parts.some((part) => part.length > 0);
  // With nothing to differentiate, what the builder recorded has no meaning, and would be refused.
  const recorded = differentiates ? graph.nodeOverrides : [];
  return {
    graph: { source: { case: "serialized", value: graph.toBytes() } },
    overrides: [...overrideMessages(options.overrides ?? [], graph), ...overrideMessages(recorded)],
    fetches: namesOf(options.fetches, graph),
    derivative: differentiates ? { case: "vjp", value: vjp } : { case: undefined },
    noGradient: chosen(options.noGradient ?? "error", NO_GRADIENT, "noGradient"),
    rewrites: rewriteNames(options.rewrites ?? []),
    jit: chosen(options.jit ?? "off", JIT, "jit"),
    ...(options.batching === false ? { batching: { allowed: false } } : {}),
  };
}

function chosen<W extends string, T>(word: W, choices: Readonly<Record<W, T>>, what: string): T {
  if (typeof word === "string" && Object.hasOwn(choices, word)) return choices[word];
  throw errorOf("INVALID_DERIVATIVE", `${what} is ${oneOf(Object.keys(choices))}, not ${shown(word)}.`);
}

function rewriteNames(rewrites: string | readonly string[]): string[] {
  const names: readonly unknown[] = Array.isArray(rewrites) ? rewrites : [rewrites];
  return names.map((name) => {
    if (typeof name === "string") return name;
    throw errorOf("UNSUPPORTED", `rewrites are named by strings, such as "fold_batch_norm", not by ${shown(name)}.`);
  });
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

/** The messages of params by label. Throws INVALID_PARAM. */
export function callParams(params: CallParams | undefined): Record<string, MessageInitShape<typeof ParamValuesSchema>> {
  if (params !== undefined && !isRecord(params)) {
    throw errorOf("INVALID_PARAM", `params is an object of values by label, then by param, not ${shown(params)}.`);
  }
  const labels = Object.entries(params ?? {});
  return Object.fromEntries(
    labels.map(([label, values]) => [label, { values: paramValues(values, `params.${label}`) }]),
  );
}
