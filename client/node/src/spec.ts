// What to compile, in the words of the caller, as the messages that say it.

import type { MessageInitShape } from "@bufbuild/protobuf";

import type { DType } from "./dtypes.js";
import { errorOf } from "./errors.js";
import type { ParamValuesSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import type { OverrideSchema } from "./gen/gradrule/v1/override_pb.js";
import { NoGradient, UnconnectedGradients } from "./gen/gradrule/v1/program_pb.js";
import type { ProgramSpecSchema } from "./gen/gradrule/v1/program_pb.js";
import type { NamedTensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import { Output } from "./graph.js";
import type { Graph } from "./graph.js";
import { definitionMessage, paramValues } from "./rules.js";
import type { Params, RuleSource } from "./rules.js";
import { Tensor, tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { namedTensor } from "./wire.js";

/** A tensor of a graph: its name (`y` is `y:0`) or its handle. */
export type Name = string | Output;

/** Tensors by name; a Map may have handles as keys. */
export type Feeds = Readonly<Record<string, TensorLike>> | ReadonlyMap<Name, TensorLike>;

/** An upstream gradient: a value, or the handle of a tensor of the graph; null for ones. */
export type GradY = TensorLike | Output | null;

/** Upstream gradients by y, or in the order of ys. */
export type GradYs = Readonly<Record<string, GradY>> | ReadonlyMap<Name, GradY> | readonly GradY[];

/** A rule by its name, or one that is registered nowhere. */
export type RuleRef = string | RuleSource;

/** Nodes with the rule that they get. What is given of `opType`, `node` and `scope` must all hold. */
export interface Override {
  readonly rule: RuleRef;
  readonly opType?: string;
  /** Exact name, or a glob: `*` stays between slashes, `**` crosses them. */
  readonly node?: string;
  readonly scope?: string;
  readonly params?: Params;
  /** By which a call gives params. Default: op type, else node, else scope. */
  readonly label?: string;
  /** True: no error where no node on the path matches. */
  readonly optional?: boolean;
}

/** Rules by op type, or an ordered list in which the first match decides. */
export type Overrides = Readonly<Record<string, RuleRef | readonly [RuleRef, Params]>> | readonly Override[];

/** What to compute, in the words of `tf.gradients` and `Session.run`. */
export interface SpecOptions {
  /** Tensors to put out. */
  readonly fetches?: readonly Name[];
  /** What is differentiated. */
  readonly ys?: readonly Name[];
  /** With respect to what. */
  readonly xs?: readonly Name[];
  /** Tensors that count as constants. */
  readonly stopGradients?: readonly Name[];
  /** What a gradient is where y does not depend on x: null or zeros. Default: `none`. */
  readonly unconnectedGradients?: "none" | "zero";
  readonly overrides?: Overrides;
  /** What to do with an op on the path that has no gradient. Default, and so far all there is: `error`. */
  readonly noGradient?: "error";
}

/** Param values by the label of an override. */
export type CallParams = Readonly<Record<string, Params>>;

/** The text of a name. */
export function nameOf(name: Name): string {
  return name instanceof Output ? name.name : name;
}

/** Upstream gradients in two kinds: those in the graph belong to the program, the others to the call. */
export interface SplitGradYs {
  readonly inGraph: readonly { y: string; tensor: string }[];
  readonly values: readonly { y: string; value: TensorLike }[];
}

/** Sorts upstream gradients by where they come from. Throws INVALID_DERIVATIVE where the list is longer than ys. */
export function splitGradYs(gradYs: GradYs | undefined, ys: readonly string[]): SplitGradYs {
  const inGraph: { y: string; tensor: string }[] = [];
  const values: { y: string; value: TensorLike }[] = [];
  for (const [y, value] of gradYEntries(gradYs, ys)) {
    if (value instanceof Output || typeof value === "string") inGraph.push({ y, tensor: nameOf(value) });
    else if (value !== null) values.push({ y, value });
  }
  return { inGraph, values };
}

function gradYEntries(gradYs: GradYs | undefined, ys: readonly string[]): (readonly [string, GradY])[] {
  if (gradYs === undefined) return [];
  if (!Array.isArray(gradYs)) return entriesOf(gradYs as Exclude<GradYs, readonly GradY[]>);
  const list = gradYs as readonly GradY[];
  if (list.length !== ys.length) {
    throw errorOf("INVALID_DERIVATIVE", `gradYs has ${list.length} entries for ${ys.length} ys; null stands for ones.`);
  }
  return list.map((value, index) => [ys[index]!, value]);
}

function entriesOf<T>(values: Readonly<Record<string, T>> | ReadonlyMap<Name, T>): (readonly [string, T])[] {
  if (values instanceof Map) return [...(values as ReadonlyMap<Name, T>)].map(([name, value]) => [nameOf(name), value]);
  return Object.entries(values as Readonly<Record<string, T>>);
}

/** The message of a program. */
export function specMessage(
  graph: Graph,
  options: SpecOptions,
  inGraph: SplitGradYs["inGraph"],
): MessageInitShape<typeof ProgramSpecSchema> {
  const ys = (options.ys ?? []).map(nameOf);
  const xs = (options.xs ?? []).map(nameOf);
  const vjp = {
    ys,
    xs,
    gradYs: inGraph.map(({ y, tensor: name }) => ({ y, tensor: name })),
    stopGradients: (options.stopGradients ?? []).map(nameOf),
    unconnectedGradients: unconnected(options.unconnectedGradients ?? "none"),
  };
  const differentiates = ys.length > 0 || xs.length > 0;
  return {
    graph: { source: { case: "serialized", value: graph.toBytes() } },
    overrides: overrideMessages(options.overrides ?? []),
    fetches: (options.fetches ?? []).map(nameOf),
    derivative: differentiates ? { case: "vjp", value: vjp } : { case: undefined },
    noGradient: options.noGradient === undefined ? NoGradient.UNSPECIFIED : NoGradient.ERROR,
  };
}

function unconnected(word: "none" | "zero"): UnconnectedGradients {
  if (word === "none") return UnconnectedGradients.NONE;
  if (word === "zero") return UnconnectedGradients.ZERO;
  throw new RangeError(`unconnectedGradients is ${JSON.stringify(word)}; it is "none" or "zero"`);
}

function overrideMessages(overrides: Overrides): MessageInitShape<typeof OverrideSchema>[] {
  if (Array.isArray(overrides)) return (overrides as readonly Override[]).map(overrideMessage);
  return Object.entries(overrides as Exclude<Overrides, readonly Override[]>).map(([opType, choice]) => {
    const [rule, params] = Array.isArray(choice) ? (choice as [RuleRef, Params]) : [choice as RuleRef, {}];
    return overrideMessage({ rule, opType, params });
  });
}

function overrideMessage(override: Override): MessageInitShape<typeof OverrideSchema> {
  const { rule, opType, node, scope, params, label, optional } = override;
  return {
    selector: { opType: opType ?? "", node: node ?? "", scope: scope ?? "" },
    choice:
      typeof rule === "string" ? { case: "rule", value: rule } : { case: "definition", value: definitionMessage(rule) },
    params: paramValues(params ?? {}),
    label: label ?? "",
    optional: optional ?? false,
  };
}

/** The messages of feeds or upstream gradients; nested arrays take the element type that `dtypeOf` tells. */
export function namedTensors(
  values: Iterable<readonly [string, TensorLike]>,
  dtypeOf: (name: string) => DType | undefined,
): MessageInitShape<typeof NamedTensorSchema>[] {
  return Array.from(values, ([name, value]) => namedTensor(name, asTensor(value, dtypeOf(name))));
}

export function feedMessages(
  feeds: Feeds,
  dtypeOf: (name: string) => DType | undefined,
): MessageInitShape<typeof NamedTensorSchema>[] {
  return namedTensors(entriesOf(feeds), dtypeOf);
}

/** Lists take the tensor's type; typed arrays and tensors have their own, which the server compares. */
function asTensor(value: TensorLike, dtype: DType | undefined): Tensor {
  const own = value instanceof Tensor || (ArrayBuffer.isView(value) && dtype !== "string");
  return tensor(value, own || dtype === undefined ? {} : { dtype });
}

/** The messages of params by label. */
export function callParams(params: CallParams | undefined): Record<string, MessageInitShape<typeof ParamValuesSchema>> {
  const labels = Object.entries(params ?? {});
  return Object.fromEntries(labels.map(([label, values]) => [label, { values: paramValues(values) }]));
}
