// Converts JavaScript values to attribute values of nodes.

import { create } from "@bufbuild/protobuf";

import { dtypeNumber, isDType } from "./dtypes.js";
import { GradruleError, createError } from "./errors.js";
import { ATTRS } from "./gen/attrs.js";
import { AttrValueSchema, AttrValue_ListValueSchema } from "./gen/gradrule/v1/graph_pb.js";
import type { AttrValue, AttrValue_ListValue } from "./gen/gradrule/v1/graph_pb.js";
import { tensor } from "./tensor.js";
import type { Tensor, TensorLike } from "./tensor.js";
import { formatValue } from "./values.js";
import { shapeMessage, tensorMessage } from "./wire.js";
import type { Shape } from "./wire.js";

type Single = "string" | "int" | "float" | "bool" | "type" | "shape" | "tensor" | "func";

/** Type of an attribute, in TensorFlow's notation. */
export type AttrKind = Single | `list(${Single})`;

/** Value of an attribute. The op's definition determines its type; without one, the value does. */
export type AttrInput =
  string | number | bigint | boolean | Uint8Array | Shape | Tensor | AttrValue | readonly AttrInput[];

/**
 * Creates an attribute with an explicit type, for nodes that are not TensorFlow ops (calls of a graph's functions):
 * `attr("float", 1)`, `attr("type", "int64")`, `attr("list(shape)", [[2, 3], null])`. Throws INVALID_ATTR.
 */
export function attr(kind: AttrKind, value: AttrInput): AttrValue {
  const inner = /^list\((\w+)\)$/.exec(kind)?.[1];
  if (inner === undefined) return create(AttrValueSchema, { value: single(kind as Single, value) });
  if (!Array.isArray(value)) throw mismatch(kind, value);
  return create(AttrValueSchema, { value: { case: "list", value: list(inner as Single, value as AttrInput[]) } });
}

/** Converts the value of attribute `name` of a node of type `opType`. Throws INVALID_ATTR, which names both. */
export function attrValue(opType: string, name: string, value: AttrInput): AttrValue {
  if (isAttrValue(value)) return value;
  try {
    return attr(attrKind(opType, name) ?? inferredKind(value), value);
  } catch (cause) {
    if (!(cause instanceof GradruleError)) throw cause;
    throw createError("INVALID_ATTR", `Attribute ${name} of ${opType}: ${cause.message}`);
  }
}

/**
 * Like `attrValue`, but `opType` may be a group or empty. Any op type with this attribute then determines the type. Throws
 * INVALID_ATTR if there is none.
 */
export function attrValueForGroup(opType: string, name: string, value: AttrInput): AttrValue {
  if (Object.hasOwn(ATTRS, opType) || name.startsWith("_") || isAttrValue(value)) return attrValue(opType, name, value);
  const owner = Object.keys(ATTRS).find((known) => attrKinds(known).has(name));
  if (owner === undefined) throw createError("INVALID_ATTR", `No op type has an attribute ${JSON.stringify(name)}.`);
  return attrValue(owner, name, value);
}

function attrKinds(opType: string): Map<string, AttrKind> {
  return new Map(ATTRS[opType]!.split(", ").map((entry) => entry.split(" ") as [string, AttrKind]));
}

function attrKind(opType: string, name: string): AttrKind | undefined {
  if (!Object.hasOwn(ATTRS, opType)) return undefined;
  const kinds = attrKinds(opType);
  if (kinds.has(name) || name.startsWith("_")) return kinds.get(name);
  throw createError("INVALID_ATTR", `the op has no attribute of this name; it has ${[...kinds.keys()].join(", ")}.`);
}

function inferredKind(value: AttrInput): AttrKind {
  if (Array.isArray(value))
    return value.length > 0 ? `list(${inferredKind(value[0] as AttrInput) as Single})` : "list(int)";
  if (typeof value === "boolean") return "bool";
  if (typeof value === "bigint") return "int";
  if (typeof value === "number") return Number.isInteger(value) ? "int" : "float";
  if (typeof value === "string" || value instanceof Uint8Array) return "string";
  return value === null ? "shape" : "tensor";
}

function isAttrValue(value: AttrInput): value is AttrValue {
  return typeof value === "object" && value !== null && "$typeName" in value;
}

function single(kind: Single, value: AttrInput): AttrValue["value"] {
  switch (kind) {
    case "string":
      return { case: "s", value: toBytes(value) };
    case "int":
      return { case: "i", value: toInteger(value) };
    case "float":
      return { case: "f", value: toNumber(value) };
    case "bool":
      if (typeof value !== "boolean") throw mismatch(kind, value);
      return { case: "b", value };
    case "type":
      return { case: "type", value: toTypeNumber(value) };
    case "shape":
      return { case: "shape", value: shapeMessage(value as Shape) };
    case "tensor":
      return { case: "tensor", value: tensorMessage(tensor(value as TensorLike)) };
    case "func":
      if (typeof value !== "string") throw mismatch(kind, value);
      return { case: "func", value: { $typeName: "gradrule.v1.NameAttrList", name: value, attr: {} } };
    default:
      throw createError("INVALID_ATTR", `There is no attribute type ${JSON.stringify(kind)}.`);
  }
}

function list(kind: Single, values: readonly AttrInput[]): AttrValue_ListValue {
  const entries = values.map((value) => single(kind, value).value);
  const field = {
    string: "s",
    int: "i",
    float: "f",
    bool: "b",
    type: "type",
    shape: "shape",
    tensor: "tensor",
    func: "func",
  };
  return create(AttrValue_ListValueSchema, { [field[kind]]: entries });
}

function toBytes(value: AttrInput): Uint8Array {
  if (typeof value === "string") return new TextEncoder().encode(value);
  if (value instanceof Uint8Array) return value;
  throw mismatch("string", value);
}

function toInteger(value: AttrInput): bigint {
  if (typeof value === "bigint") return value;
  if (typeof value === "number" && Number.isSafeInteger(value)) return BigInt(value);
  throw mismatch("int", value);
}

function toNumber(value: AttrInput): number {
  if (typeof value === "number") return value;
  throw mismatch("float", value);
}

function toTypeNumber(value: AttrInput): ReturnType<typeof dtypeNumber> {
  if (isDType(value)) return dtypeNumber(value);
  throw mismatch("type", value);
}

function mismatch(kind: AttrKind, value: AttrInput): Error {
  return createError("INVALID_ATTR", `${formatValue(value)} is no value of type ${kind}.`);
}
