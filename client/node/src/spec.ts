// Converts options of evaluate, explain and compile to messages.

import type { MessageInitShape } from "@bufbuild/protobuf";

import type { DType } from "./dtypes.js";
import { GradruleError, createError } from "./errors.js";
import type { Reason } from "./errors.js";
import type { ParamValuesSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import { Jit, NoGradient, UnconnectedGradients } from "./gen/gradrule/v1/program_pb.js";
import type { ProgramSpecSchema } from "./gen/gradrule/v1/program_pb.js";
import { GraphFormat } from "./gen/gradrule/v1/rule_pb.js";
import type { GraphSourceSchema } from "./gen/gradrule/v1/rule_pb.js";
import type { NamedTensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import { Graph } from "./graph.js";
import { Output, tensorName, tensorNames } from "./handles.js";
import type { Name, Names } from "./handles.js";
import { withoutOutputZero } from "./names.js";
import type { OnnxModel } from "./onnx.js";
import { overrideMessages } from "./overrides.js";
import type { Overrides } from "./overrides.js";
import { paramValues } from "./rules.js";
import type { Params } from "./rules.js";
import { Tensor, tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { isRecord, listChoices, formatValue } from "./values.js";
import type { OptionNames } from "./values.js";
import { namedTensor } from "./wire.js";

/** Values of tensors by name. The keys of a Map can be handles. */
export type Feeds = Readonly<Record<string, TensorLike>> | ReadonlyMap<Name, TensorLike>;

/** An upstream gradient: a value, or the name or handle of a tensor in the graph; null means ones. */
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

// The default is not sent, so that equal programs have equal bytes.
const JIT = { off: Jit.UNSPECIFIED, on: Jit.ON } as const;

/**
 * Declares that concurrent calls of a program may run together: axis 0 counts the examples of all inputs whose size along it
 * is not fixed, and of all results, and the results of an example do not depend on other examples.
 */
export interface Batching {
  readonly axis: 0;
}

/** What to compute; the names are those of `tf.gradients` and `Session.run`. */
export interface SpecOptions {
  /** Tensors to return. */
  readonly fetches?: Names;
  /** Tensors to differentiate. */
  readonly ys?: Names;
  /** Tensors to differentiate with respect to. */
  readonly xs?: Names;
  /** Tensors to treat as constants. */
  readonly stopGradients?: Names;
  /** Gradient if y does not depend on x: `none` (null) or `zero`. Default: `none`. */
  readonly unconnectedGradients?: keyof typeof UNCONNECTED;
  readonly overrides?: Overrides;
  /**
   * What to do with an op on the path that has neither a gradient nor an override. `error` (the default): fail. `default`: do
   * as TensorFlow does. `pass`: pass the upstream gradient to the input. `zero`: use zeros.
   */
  readonly noGradient?: keyof typeof NO_GRADIENT;
  /**
   * Rewrites of the graph before overrides are resolved. `fold_batch_norm` folds batch normalizations into linear
   * ops.
   */
  readonly rewrites?: string | readonly string[];
  /**
   * `on`: XLA computes all calls; the first with new shapes takes seconds. Results are equal up to rounding. A program
   * whose ops XLA would compute differently is refused. Default: `off`.
   */
  readonly jit?: keyof typeof JIT;
  /** `{ axis: 0 }` lets the server run concurrent calls of the program together. Default: calls run alone. */
  readonly batching?: Batching;
}

export const SPEC_OPTIONS = {
  fetches: true,
  ys: true,
  xs: true,
  stopGradients: true,
  unconnectedGradients: true,
  overrides: true,
  noGradient: true,
  rewrites: true,
  jit: true,
  batching: true,
} as const satisfies OptionNames<SpecOptions>;

/** Param values by the label of an override. */
export type CallParams = Readonly<Record<string, Params>>;

/** Returns the element type of a tensor by its name; undefined if only the server knows it. */
export type DTypeOf = (name: string) => DType | undefined;

type Entries<T> = readonly (readonly [string, T])[];

/** Upstream gradients by y. Names of tensors are part of the program; values are part of the call. */
export interface SplitGradYs {
  readonly inGraph: Entries<string>;
  readonly values: Entries<TensorLike>;
}

/** Separates names of tensors from values. Throws INVALID_DERIVATIVE if the upstream gradients do not match the ys. */
export function splitGradYs(gradYs: GradYs | undefined, ys: readonly string[], graph?: Graph): SplitGradYs {
  const inGraph: [string, string][] = [];
  const values: [string, TensorLike][] = [];
  for (const [y, value] of gradYEntries(gradYs ?? {}, ys, graph)) {
    if (value instanceof Output || typeof value === "string") inGraph.push([y, tensorName(value, graph)]);
    else if (value !== null) values.push([y, value]);
  }
  return { inGraph, values };
}

function gradYEntries(gradYs: GradYs, ys: readonly string[], graph: Graph | undefined): Entries<GradY> {
  if (Array.isArray(gradYs)) {
    const list = gradYs as readonly GradY[];
    if (list.length === ys.length) return list.map((value, index) => [ys[index]!, value]);
    throw createError(
      "INVALID_DERIVATIVE",
      `gradYs has ${list.length} entries for ${ys.length} ys; null stands for ones.`,
    );
  }
  const byName = entriesOf(gradYs as Exclude<GradYs, readonly GradY[]>, graph);
  return byName.map(([name, value]) => {
    const y = ys.find((known) => withoutOutputZero(known) === withoutOutputZero(name));
    if (y !== undefined) return [y, value];
    throw createError("INVALID_DERIVATIVE", `gradYs has ${name}, which is none of the ys: ${ys.join(", ") || "none"}.`);
  });
}

function entriesOf<T>(
  values: Readonly<Record<string, T>> | ReadonlyMap<Name, T>,
  graph: Graph | undefined,
): Entries<T> {
  if (!(values instanceof Map)) return Object.entries(values as Readonly<Record<string, T>>);
  return [...(values as ReadonlyMap<Name, T>)].map(([name, value]) => [tensorName(name, graph), value]);
}

/** Converts a program to a message. Throws UNKNOWN_TENSOR, INVALID_DERIVATIVE, INVALID_OVERRIDE, UNSUPPORTED. */
export function specMessage(
  model: Graph | OnnxModel,
  options: SpecOptions,
  { inGraph, values }: SplitGradYs,
): MessageInitShape<typeof ProgramSpecSchema> {
  const graph = model instanceof Graph ? model : undefined;
  const vjp = {
    ys: tensorNames(options.ys, graph),
    xs: tensorNames(options.xs, graph),
    gradYs: inGraph.map(([y, name]) => ({ y, tensor: name })),
    stopGradients: tensorNames(options.stopGradients, graph),
    unconnectedGradients: choiceValue(options.unconnectedGradients ?? "none", UNCONNECTED, "unconnectedGradients"),
  };
  const parts = [vjp.ys, vjp.xs, vjp.gradYs, vjp.stopGradients, values];
  const differentiates = parts.some((part) => part.length > 0);
  // Without a derivative the server would refuse the overrides that the graph builder recorded.
  const recorded = (differentiates && graph?.nodeOverrides) || [];
  return {
    graph: sourceMessage(model),
    overrides: [
      ...overrideMessages(options.overrides ?? [], graph),
      ...overrideMessages(recorded).map((override) => ({ ...override, partOfGraph: true })),
    ],
    fetches: tensorNames(options.fetches, graph),
    derivative: differentiates ? { case: "vjp", value: vjp } : { case: undefined },
    noGradient: choiceValue(options.noGradient ?? "error", NO_GRADIENT, "noGradient"),
    rewrites: rewriteNames(options.rewrites ?? []),
    jit: choiceValue(options.jit ?? "off", JIT, "jit"),
    ...(options.batching === undefined ? {} : { batching: { axis: batchingAxis(options.batching) } }),
  };
}

function sourceMessage(model: Graph | OnnxModel): MessageInitShape<typeof GraphSourceSchema> {
  if (model instanceof Graph) return { source: { case: "serialized", value: model.toBytes() } };
  return { source: { case: "serialized", value: model.bytes }, format: GraphFormat.ONNX };
}

/** Returns the value of a choice. Throws an error with `reason` for an unknown one. */
export function choiceValue<W extends string, T>(
  choice: W,
  choices: Readonly<Record<W, T>>,
  what: string,
  reason: Reason = "INVALID_DERIVATIVE",
): T {
  if (typeof choice === "string" && Object.hasOwn(choices, choice)) return choices[choice];
  throw createError(reason, `${what} is ${listChoices(Object.keys(choices))}, not ${formatValue(choice)}.`);
}

function batchingAxis(batching: Batching): number {
  if (isRecord(batching) && batching.axis === 0) return 0;
  throw createError("INVALID_PARAM", `batching is { axis: 0 }, not ${formatValue(batching)}.`);
}

function rewriteNames(rewrites: string | readonly string[]): string[] {
  const names: readonly unknown[] = Array.isArray(rewrites) ? rewrites : [rewrites];
  return names.map((name) => {
    if (typeof name === "string") return name;
    throw createError(
      "UNSUPPORTED",
      `rewrites are named by strings, such as "fold_batch_norm", not by ${formatValue(name)}.`,
    );
  });
}

/** Converts feeds to messages. */
export function feedMessages(
  feeds: Feeds,
  dtypeOf: DTypeOf,
  graph?: Graph,
): MessageInitShape<typeof NamedTensorSchema>[] {
  return namedTensors(entriesOf(feeds, graph), dtypeOf, "feeds");
}

/** Converts tensors to messages. Nested arrays get the type that `dtypeOf` returns. Throws INVALID_TENSOR. */
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
      throw createError(cause.reason, `${what}.${name}: ${cause.message}`);
    }
  });
}

/** Makes a tensor. Typed arrays and tensors keep their type, which the server checks; nested arrays get `dtype`. */
function asTensor(value: TensorLike, dtype: DType | undefined): Tensor {
  const typed = value instanceof Tensor || (ArrayBuffer.isView(value) && dtype !== "string");
  return tensor(value, typed || dtype === undefined ? {} : { dtype });
}

/** Converts param values, by label, to messages. Throws INVALID_PARAM. */
export function callParams(params: CallParams | undefined): Record<string, MessageInitShape<typeof ParamValuesSchema>> {
  if (params !== undefined && !isRecord(params)) {
    throw createError(
      "INVALID_PARAM",
      `params is an object of values by label, then by param, not ${formatValue(params)}.`,
    );
  }
  const labels = Object.entries(params ?? {});
  return Object.fromEntries(
    labels.map(([label, values]) => [label, { values: paramValues(values, `params.${label}`) }]),
  );
}
