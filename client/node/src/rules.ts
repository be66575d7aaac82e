// Converts rules and their params to and from protobuf messages.

import { toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { timestampDate } from "@bufbuild/protobuf/wkt";

import { GradruleError, createError } from "./errors.js";
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
import { isRecord, formatValue } from "./values.js";
import { tensorMessage, readTensor } from "./wire.js";

/** Values of a rule's params. */
export type Params = Readonly<Record<string, TensorLike>>;

/** Params that a rule declares: their names, or default values by name; null means that every use must give a value. */
export type ParamDefaults = readonly string[] | Readonly<Record<string, TensorLike | null>>;

/** What a rule computes: a formula over `x`, `y`, `dy`, `default`, params, or a graph from `x`, `dy`, … to `dx`. */
export type RuleForm = string | { readonly expression: string } | { readonly graph: Graph };

/** A rule that is not registered. */
export type RuleSource = ({ readonly expression: string } | { readonly graph: Graph }) & {
  readonly params?: ParamDefaults;
};

/** Origin of a rule: TensorFlow's registry, the server's catalogue, or a client. */
export type Kind = "op" | "builtin" | "user";

/** A param that a rule declares. */
export interface Param {
  readonly name: string;
  /** Default value; null means that every use must give a value. */
  readonly default: number | Tensor | null;
  /** Meaning and unit. */
  readonly description: string;
  /** Allowed values: conditions such as `> 0, integer`; empty: all. */
  readonly range: string;
}

/** A named list of overrides. */
export interface Preset {
  readonly name: string;
  /** What it does, and for which models. */
  readonly description: string;
  /** Paper or library that defines it. */
  readonly reference: string;
  /** Its overrides in order, one line each, as text. */
  readonly overrides: readonly string[];
  /** Params of its rules, each name once, with the preset's values as defaults. */
  readonly params: readonly Param[];
}

/** A registered rule. */
export interface Rule {
  /** Name without `rules/`. */
  readonly name: string;
  readonly kind: Kind;
  readonly expression: string | null;
  readonly graph: Graph | null;
  /** Default values by name; null means that every use must give a value. */
  readonly params: Readonly<Record<string, number | Tensor | null>>;
  /** The params with descriptions and ranges, in order. */
  readonly paramInfos: readonly Param[];
  readonly description: string;
  /** Op types and groups that the rule is intended for. */
  readonly opTypes: readonly string[];
  /** Paper or library that defines it. */
  readonly reference: string;
  /** SHA-256 (hex) of the content. */
  readonly digest: string;
  readonly createTime: Date | null;
  /** Whether the gradient of each example along axis 0 does not depend on other examples; null if unknown. */
  readonly perSample: boolean | null;
  readonly aliases: readonly string[];
  /** What it computes, as text. */
  readonly formula: string;
  /** Family of a BUILTIN rule, for example `surrogate`. */
  readonly family: string;
  /** Whether the rule is the true gradient of the ops in `opTypes`, up to rounding. */
  readonly trueGradient: boolean;
  /** Whether a BUILTIN rule has the same name and is available only as `builtin/NAME`. */
  readonly hidesBuiltin: boolean;
}

/** Names of registered rules and of op types. */
const NAME = /^((rules|builtin)\/)?[A-Za-z_][A-Za-z0-9_.>-]*$/;

/** Returns text that cannot be a name as a rule with that formula: `"dy * x"` is a formula, `"ste"` is a name. */
export function namedOrRule(rule: string): string | RuleSource {
  return rule.trim() === "" || NAME.test(rule) ? rule : { expression: rule };
}

/**
 * Converts a rule's definition to a message. A rule without declared params declares those that its use gives. Throws
 * INVALID_RULE.
 */
export function definitionMessage(
  source: RuleSource,
  usedParams: readonly string[] = [],
): MessageInitShape<typeof RuleDefinitionSchema> {
  if (!isRecord(source)) {
    throw createError("INVALID_RULE", `A rule is its name, { expression } or { graph }, not ${formatValue(source)}.`);
  }
  const params = declared(source.params ?? usedParams).map(([name, value]) =>
    value === null ? { name } : { name, defaultValue: paramValue(name, value) },
  );
  if ("expression" in source) {
    if (typeof source.expression !== "string") {
      throw createError("INVALID_RULE", `The expression of a rule is a string, not ${formatValue(source.expression)}.`);
    }
    return { form: { case: "expression", value: source.expression }, params };
  }
  if (!(source.graph instanceof Graph)) {
    throw createError("INVALID_RULE", `The graph of a rule is a Graph, not ${formatValue(source.graph)}.`);
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

/** Converts param values to messages. `what` names the params in errors. Throws INVALID_PARAM. */
export function paramValues(
  params: Params,
  what = "params",
): Record<string, MessageInitShape<typeof ParamValueSchema>> {
  if (!isRecord(params)) {
    throw createError(
      "INVALID_PARAM",
      `${what} is an object of values by the rule's param names, not ${formatValue(params)}.`,
    );
  }
  return Object.fromEntries(Object.entries(params).map(([name, value]) => [name, paramValue(name, value)]));
}

function paramValue(name: string, value: TensorLike): MessageInitShape<typeof ParamValueSchema> {
  if (typeof value === "number") return { value: { case: "number", value } };
  // float64 keeps the precision until the rule converts the value to the element type of x.
  const isNumberArray = Array.isArray(value) && typeof value.flat(Number.POSITIVE_INFINITY)[0] === "number";
  try {
    const content = tensor(value, isNumberArray ? { dtype: "float64" } : {});
    if (content.dtype !== "string") return { value: { case: "tensor", value: tensorMessage(content) } };
  } catch (cause) {
    if (!(cause instanceof GradruleError)) throw cause;
    throw createError("INVALID_PARAM", `Param ${name}: ${cause.message}`);
  }
  throw createError("INVALID_PARAM", `Param ${name} is a number or a tensor of numbers, not ${formatValue(value)}.`);
}

/** Reads a rule from a message. */
export function readRule(message: RuleMessage): Rule {
  const form = message.definition?.form;
  const paramInfos = (message.definition?.params ?? []).map(readParam);
  return {
    name: message.name.replace(/^rules\//, ""),
    kind: RuleKind[message.kind].toLowerCase() as Kind,
    expression: form?.case === "expression" ? form.value : null,
    graph: form?.case === "graph" ? readGraph(form.value) : null,
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

/** Reads a preset from a message. */
export function readPreset({ name, description, reference, overrides, params }: PresetMessage): Preset {
  return { name, description, reference, overrides, params: params.map(readParam) };
}

function readParam({ name, defaultValue, description, range }: RuleParam): Param {
  return { name, default: defaultValue ? readParamValue(defaultValue) : null, description, range };
}

function readGraph({ source }: GraphSource): Graph | null {
  if (source.case === "serialized") return Graph.fromBytes(source.value);
  return source.case === "inlineGraph" ? Graph.fromBytes(toBinary(GraphSchema, source.value)) : null;
}

function readParamValue({ value }: ParamValue): number | Tensor | null {
  if (value.case === "tensor") return readTensor(value.value);
  return value.case === "number" ? value.value : null;
}
