// Rules and their params, to and from the messages that carry them.

import { toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { timestampDate } from "@bufbuild/protobuf/wkt";

import { RuleKind } from "./gen/gradrule/v1/rule_pb.js";
import type {
  GraphSource,
  ParamValue,
  ParamValueSchema,
  Rule as RuleMessage,
  RuleDefinitionSchema,
} from "./gen/gradrule/v1/rule_pb.js";
import { GraphSchema } from "./gen/gradrule/v1/graph_pb.js";
import { Graph } from "./graph.js";
import { tensor } from "./tensor.js";
import type { Tensor, TensorLike } from "./tensor.js";
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

/** A rule of the registry. */
export interface Rule {
  /** Bare name, without `rules/`. */
  readonly name: string;
  readonly kind: Kind;
  readonly expression: string | null;
  readonly graph: Graph | null;
  /** Defaults by name, null where every use must give a value. */
  readonly params: Readonly<Record<string, number | Tensor | null>>;
  readonly description: string;
  /** Op types that the rule is meant for. */
  readonly opTypes: readonly string[];
  /** Paper or library that it is from. */
  readonly reference: string;
  /** SHA-256 (hex) of the content. */
  readonly digest: string;
  readonly createTime: Date | null;
  /** Whether each example along axis 0 gets a gradient of its own; null where that is not known. */
  readonly perSample: boolean | null;
  readonly aliases: readonly string[];
}

/** The message of a rule's content. Where it declares no params itself, those that its use gives count as declared. */
export function definitionMessage(
  source: RuleSource,
  usedParams: readonly string[] = [],
): MessageInitShape<typeof RuleDefinitionSchema> {
  const params = declared(source.params ?? usedParams).map(([name, value]) =>
    value === null ? { name } : { name, defaultValue: paramValue(value) },
  );
  if ("expression" in source) return { form: { case: "expression", value: source.expression }, params };
  const graph = { source: { case: "serialized" as const, value: source.graph.toBytes() } };
  return { form: { case: "graph", value: graph }, params };
}

function declared(params: ParamDefaults): (readonly [string, TensorLike | null])[] {
  return isNames(params) ? params.map((name) => [name, null]) : Object.entries(params);
}

function isNames(params: ParamDefaults): params is readonly string[] {
  return Array.isArray(params);
}

/** The messages of param values by name. */
export function paramValues(params: Params): Record<string, MessageInitShape<typeof ParamValueSchema>> {
  return Object.fromEntries(Object.entries(params).map(([name, value]) => [name, paramValue(value)]));
}

function paramValue(value: TensorLike): MessageInitShape<typeof ParamValueSchema> {
  if (typeof value === "number") return { value: { case: "number", value } };
  // float64 keeps what was written until the rule casts it to the element type of x.
  const listed = Array.isArray(value) && typeof value.flat(Number.POSITIVE_INFINITY)[0] === "number";
  return { value: { case: "tensor", value: tensorMessage(tensor(value, listed ? { dtype: "float64" } : {})) } };
}

/** A rule, as the server tells it. */
export function ruleOf(message: RuleMessage): Rule {
  const form = message.definition?.form;
  return {
    name: message.name.replace(/^rules\//, ""),
    kind: RuleKind[message.kind].toLowerCase() as Kind,
    expression: form?.case === "expression" ? form.value : null,
    graph: form?.case === "graph" ? graphOf(form.value) : null,
    params: Object.fromEntries(
      (message.definition?.params ?? []).map(({ name, defaultValue }) => [
        name,
        defaultValue ? paramOf(defaultValue) : null,
      ]),
    ),
    description: message.description,
    opTypes: message.opTypes,
    reference: message.reference,
    digest: message.digest,
    createTime: message.createTime ? timestampDate(message.createTime) : null,
    perSample: message.perSample ?? null,
    aliases: message.aliases,
  };
}

function graphOf({ source }: GraphSource): Graph | null {
  if (source.case === "serialized") return Graph.fromBytes(source.value);
  return source.case === "inline" ? Graph.fromBytes(toBinary(GraphSchema, source.value)) : null;
}

function paramOf({ value }: ParamValue): number | Tensor | null {
  if (value.case === "tensor") return tensorOf(value.value);
  return value.case === "number" ? value.value : null;
}
