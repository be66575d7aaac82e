// Rules and their params, to and from the messages that carry them.

import { toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { timestampDate } from "@bufbuild/protobuf/wkt";

import { GradruleError, errorOf } from "./errors.js";
import { RuleKind } from "./gen/gradrule/v1/rule_pb.js";
import type {
  GraphSource,
  ParamValue,
  ParamValueSchema,
  Preset as PresetMessage,
  Rule as RuleMessage,
  RuleDefinitionSchema,
  RuleParam,
} from "./gen/gradrule/v1/rule_pb.js";
import { GraphSchema } from "./gen/gradrule/v1/graph_pb.js";
import { Graph } from "./graph.js";
import { tensor } from "./tensor.js";
import type { Tensor, TensorLike } from "./tensor.js";
import { isRecord, shown } from "./values.js";
import { tensorMessage, tensorOf } from "./wire.js";

/** Values of a rule's params. */
export type Params = Readonly<Record<string, TensorLike>>;

/** Params that a rule declares: their names, or defaults by name, null where every use must give a value. */
export type ParamDefaults = readonly string[] | Readonly<Record<string, TensorLike | null>>;

/** What a rule computes: a formula over `x`, `y`, `dy`, `default`, params, or a graph from `x`, `dy`, … to `dx`. */
export type RuleForm = string | { readonly expression: string } | { readonly graph: Graph };

/** A rule that is registered nowhere. */
export type RuleSource = ({ readonly expression: string } | { readonly graph: Graph }) & {
  readonly params?: ParamDefaults;
};

/** Where a rule comes from: TensorFlow's registry, the catalogue, or a client. */
export type Kind = "op" | "builtin" | "user";

/** A param that a rule declares. */
export interface Param {
  readonly name: string;
  /** null where every use must give a value. */
  readonly default: number | Tensor | null;
  /** Meaning and unit. */
  readonly description: string;
  /** Values it takes: conditions such as `> 0, integer`; empty: all. */
  readonly range: string;
}

/** A named list of overrides. */
export interface Preset {
  readonly name: string;
  /** What it does, and for which models. */
  readonly description: string;
  /** Paper or library that it is from. */
  readonly reference: string;
  /** Its overrides in order, one line each, for people. */
  readonly overrides: readonly string[];
  /** Params of its rules, each name once, with the preset's values as defaults. */
  readonly params: readonly Param[];
}

/** A rule of the registry. */
export interface Rule {
  /** Bare name, without `rules/`. */
  readonly name: string;
  readonly kind: Kind;
  readonly expression: string | null;
  readonly graph: Graph | null;
  /** Defaults by name, null where every use must give a value. */
  readonly params: Readonly<Record<string, number | Tensor | null>>;
  /** All that is known of the params, in order. */
  readonly paramInfos: readonly Param[];
  readonly description: string;
  /** Op types and groups that the rule is meant for. */
  readonly opTypes: readonly string[];
  /** Paper or library that it is from. */
  readonly reference: string;
  /** SHA-256 (hex) of the content. */
  readonly digest: string;
  readonly createTime: Date | null;
  /** Whether each example along axis 0 gets a gradient of its own; null where that is not known. */
  readonly perSample: boolean | null;
  readonly aliases: readonly string[];
  /** What it computes, for people. */
  readonly formula: string;
  /** Family of a BUILTIN rule: `surrogate` for example. */
  readonly family: string;
  /** Whether it is the true gradient of the ops in `opTypes`, up to rounding. */
  readonly trueGradient: boolean;
  /** Whether a BUILTIN rule of the name is to be had as `builtin/NAME` only. */
  readonly hidesBuiltin: boolean;
}

/** The message of a rule's content. Where it declares no params itself, those that its use gives count as declared. Throws INVALID_RULE. */
export function definitionMessage(
  source: RuleSource,
  usedParams: readonly string[] = [],
): MessageInitShape<typeof RuleDefinitionSchema> {
  if (!isRecord(source)) {
    throw errorOf("INVALID_RULE", `A rule is its name, { expression } or { graph }, not ${shown(source)}.`);
  }
  const params = declared(source.params ?? usedParams).map(([name, value]) =>
    value === null ? { name } : { name, defaultValue: paramValue(name, value) },
  );
  if ("expression" in source) {
    if (typeof source.expression !== "string") {
      throw errorOf("INVALID_RULE", `The expression of a rule is a string, not ${shown(source.expression)}.`);
    }
    return { form: { case: "expression", value: source.expression }, params };
  }
  if (!(source.graph instanceof Graph)) {
    throw errorOf("INVALID_RULE", `The graph of a rule is a Graph, not ${shown(source.graph)}.`);
  }
  const graph = { source: { case: "serialized" as const, value: source.graph.toBytes() } };
  return { form: { case: "graph", value: graph }, params };
}

function declared(params: ParamDefaults): (readonly [string, TensorLike | null])[] {
  return isNames(params) ? params.map((name) => [name, null]) : Object.entries(params);
}

function isNames(params: ParamDefaults): params is readonly string[] {
  return Array.isArray(params);
}

/** The messages of param values by name. `what` names the params in errors. Throws INVALID_PARAM. */
export function paramValues(
  params: Params,
  what = "params",
): Record<string, MessageInitShape<typeof ParamValueSchema>> {
  if (!isRecord(params)) {
    throw errorOf("INVALID_PARAM", `${what} is an object of values by the rule's param names, not ${shown(params)}.`);
  }
  return Object.fromEntries(Object.entries(params).map(([name, value]) => [name, paramValue(name, value)]));
}

function paramValue(name: string, value: TensorLike): MessageInitShape<typeof ParamValueSchema> {
  if (typeof value === "number") return { value: { case: "number", value } };
  // float64 keeps what was written until the rule casts it to the element type of x.
  const listed = Array.isArray(value) && typeof value.flat(Number.POSITIVE_INFINITY)[0] === "number";
  try {
    const content = tensor(value, listed ? { dtype: "float64" } : {});
    if (content.dtype !== "string") return { value: { case: "tensor", value: tensorMessage(content) } };
  } catch (cause) {
    if (!(cause instanceof GradruleError)) throw cause;
    throw errorOf("INVALID_PARAM", `Param ${name}: ${cause.message}`);
  }
  throw errorOf("INVALID_PARAM", `Param ${name} is a number or a tensor of numbers, not ${shown(value)}.`);
}

/** A rule, as the server tells it. */
export function ruleOf(message: RuleMessage): Rule {
  const form = message.definition?.form;
  const paramInfos = (message.definition?.params ?? []).map(paramInfoOf);
  return {
    name: message.name.replace(/^rules\//, ""),
    kind: RuleKind[message.kind].toLowerCase() as Kind,
    expression: form?.case === "expression" ? form.value : null,
    graph: form?.case === "graph" ? graphOf(form.value) : null,
    params: Object.fromEntries(paramInfos.map((param) => [param.name, param.default])),
    paramInfos,
    description: message.description,
    opTypes: message.opTypes,
    reference: message.reference,
    digest: message.digest,
    createTime: message.createTime ? timestampDate(message.createTime) : null,
    perSample: message.perSample ?? null,
    aliases: message.aliases,
    formula: message.formula,
    family: message.family,
    trueGradient: message.trueGradient,
    hidesBuiltin: message.hidesBuiltin,
  };
}

/** A preset, as the server tells it. */
export function presetOf({ name, description, reference, overrides, params }: PresetMessage): Preset {
  return { name, description, reference, overrides, params: params.map(paramInfoOf) };
}

function paramInfoOf({ name, defaultValue, description, range }: RuleParam): Param {
  return { name, default: defaultValue ? paramOf(defaultValue) : null, description, range };
}

function graphOf({ source }: GraphSource): Graph | null {
  if (source.case === "serialized") return Graph.fromBytes(source.value);
  return source.case === "inlineGraph" ? Graph.fromBytes(toBinary(GraphSchema, source.value)) : null;
}

function paramOf({ value }: ParamValue): number | Tensor | null {
  if (value.case === "tensor") return tensorOf(value.value);
  return value.case === "number" ? value.value : null;
}
