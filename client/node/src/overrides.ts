// Converts overrides to messages.

import { create, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";

import { attrValueForGroup } from "./attrs.js";
import type { AttrInput } from "./attrs.js";
import { DTYPES, dtypeNumber, isDType } from "./dtypes.js";
import type { DType } from "./dtypes.js";
import { createError } from "./errors.js";
import { PositionNearest, PositionSchema, RegionSchema, SelectorSchema } from "./gen/gradrule/v1/override_pb.js";
import type { GradientOverrideSchema, Position as PositionMessage, Selector } from "./gen/gradrule/v1/override_pb.js";
import type { Graph } from "./graph.js";
import { Output, tensorName, tensorNames } from "./handles.js";
import type { Names } from "./handles.js";
import { definitionMessage, namedOrRule, paramValues } from "./rules.js";
import type { Params, RuleSource } from "./rules.js";
import { formatValue, isRecord, listChoices, unknownProperty } from "./values.js";

/** The name of a rule, a formula that cannot be a name such as `"dy * x"`, or a rule that is not registered. */
export type RuleRef = string | RuleSource;

/** A rule, or a rule with its params. */
export type RuleChoice = RuleRef | readonly [RuleRef, Params];

/** A position on the path from xs to ys: one end, or an index that counts from the xs (negative: from the ys). */
export type Position = "nearest_xs" | "nearest_ys" | number;

/**
 * A subgraph, given by its input and output tensors; at least one of each. In its rule, `x, x1, …` are the inputs and
 * `y, y1, …` are the outputs, as in `tf.custom_gradient`.
 */
export interface Region {
  readonly inputs: Names;
  readonly outputs: Names;
}

/** Selects the nodes of an override. A node must meet all given conditions; at least one is required. */
export interface Conditions {
  /** Exact, or a group: `@activation`, `@linear`, `@convolution`, `@dense`, `@pool`, `@sum`, `@step`. */
  readonly opType?: string;
  /**
   * Exact name, a glob (`*` and `?` do not match `/`, `**` does), or a handle of the node. `cond[then]/inner` is the node of
   * one branch.
   */
  readonly node?: string | Output;
  /** Exact names, globs and handles; the node must match one of them. */
  readonly nodes?: readonly (string | Output)[];
  /** Regular expression (RE2) that must match the whole name. */
  readonly nodeRegex?: string;
  /** Name scope: nodes whose names start with `scope/`. */
  readonly scope?: string;
  /** Position on the path, among the nodes that meet the other conditions. */
  readonly position?: Position;
  /**
   * A chain of op types or groups that gets one rule: `["MatMul", "BiasAdd"]`. Other conditions apply to its last
   * node.
   */
  readonly pattern?: readonly string[];
  /** A kind of layer, all of whose ops get one rule: `@linear`, `@convolution`, `@dense` (with their bias), `@activation`, … */
  readonly layer?: string;
  /** Element type of the node's first output. */
  readonly dtype?: DType;
  /** Rank of the node's first output. */
  readonly rank?: number;
  /** Attributes that the node must have with these values, including defaults. */
  readonly attrs?: Readonly<Record<string, AttrInput>>;
  /** Tensors; the node must depend on at least one of them. */
  readonly dependsOn?: Names;
  /** A subgraph. No other condition can be set as well. */
  readonly region?: Region;
}

/** Properties that overrides and presets share. */
interface SharedProperties {
  readonly params?: Params;
  /**
   * Name of the override in params of calls and in results. Default: the preset's name, otherwise the first that is set of op
   * type, node, scope, regular expression, pattern (joined with `+`), layer and the region's first output.
   */
  readonly label?: string;
  /** True: it is not an error if no node on the path matches. */
  readonly optional?: boolean;
}

/** Assigns a rule to nodes; the rule `default` exempts them from later overrides. */
export interface Override extends Conditions, SharedProperties {
  readonly rule: RuleRef;
}

/**
 * A named list of overrides. They apply after all overrides that are not in a preset. Params apply to all rules of the preset
 * that have a param with this name.
 */
export interface PresetChoice extends SharedProperties {
  readonly preset: string;
}

/** Rules by op type, or an ordered list; the first override that matches a node applies. */
export type Overrides = Readonly<Record<string, RuleChoice>> | readonly (Override | PresetChoice)[];

type OverrideMessage = MessageInitShape<typeof GradientOverrideSchema>;

const PRESET_PROPERTIES = ["preset", "params", "label", "optional"] satisfies (keyof PresetChoice)[];
const OVERRIDE_PROPERTIES = [
  "rule",
  "opType",
  "node",
  "nodes",
  "nodeRegex",
  "scope",
  "position",
  "pattern",
  "layer",
  "dtype",
  "rank",
  "attrs",
  "dependsOn",
  "region",
  "params",
  "label",
  "optional",
] satisfies (keyof Override)[];

const NEAREST = { nearest_xs: PositionNearest.XS, nearest_ys: PositionNearest.YS };

/** Returns the rule and the params of a choice. Throws INVALID_OVERRIDE, which names `where`, if it is not valid. */
export function ruleAndParams(choice: RuleChoice, where: string): readonly [RuleRef, Params] {
  if (!Array.isArray(choice)) return [checkedRule(choice as RuleRef, where), {}];
  if (choice.length !== 2)
    throw invalid(`${where} is ${formatValue(choice)}; a rule with its params is a pair of both.`);
  const [rule, params] = choice as readonly [RuleRef, Params];
  return [checkedRule(rule, where), params];
}

/**
 * Converts overrides to messages, in order. Handles must belong to `graph`. Throws INVALID_OVERRIDE and errors of
 * values.
 */
export function overrideMessages(overrides: Overrides, graph?: Graph): OverrideMessage[] {
  if (isList(overrides)) {
    return overrides.map((entry, index) => {
      const where = `overrides[${index}]`;
      if (!isRecord(entry))
        throw invalid(`${where} is ${formatValue(entry)}; a list holds objects with a rule or a preset.`);
      return isPreset(entry) ? presetMessage(entry, where) : overrideMessage(entry, where, graph);
    });
  }
  if (!isRecord(overrides))
    throw invalid(`overrides is an object of rules by op type, or a list, not ${formatValue(overrides)}.`);
  return Object.entries(overrides).map(([opType, choice]) => {
    // No op type has these names: TensorFlow's op types start with a capital letter.
    if (opType === "rule" || opType === "preset") {
      throw invalid(`overrides has the key ${opType}, but its keys are op types; a single override goes into a list.`);
    }
    const where = `overrides.${opType}`;
    const [rule, params] = ruleAndParams(choice, where);
    return overrideMessage({ rule, opType, params }, where, graph);
  });
}

function presetMessage(choice: PresetChoice, where: string): OverrideMessage {
  checkProperties(choice, PRESET_PROPERTIES, `${where}, a preset,`);
  const { preset, params = {}, label, optional } = choice;
  if (typeof preset !== "string")
    throw invalid(`${where} chooses a preset by its name, not by ${formatValue(preset)}.`);
  return {
    choice: { case: "preset", value: { name: preset, params: paramValues(params, `params of ${where}`) } },
    label: text(label, "label", where),
    optional: optional ?? false,
  };
}

function overrideMessage(override: Override, where: string, graph: Graph | undefined): OverrideMessage {
  checkProperties(override, OVERRIDE_PROPERTIES, where);
  const { params = {}, label, optional } = override;
  const rule = checkedRule(override.rule, where);
  const values = paramValues(params, `params of ${where}`);
  return {
    selector: selectorMessage(override, where, graph),
    choice:
      typeof rule === "string"
        ? { case: "rule", value: rule }
        : { case: "definition", value: definitionMessage(rule, Object.keys(params)) },
    params: values,
    label: text(label, "label", where),
    optional: optional ?? false,
  };
}

function selectorMessage(conditions: Conditions, where: string, graph: Graph | undefined): Selector {
  const { node, position, pattern, dtype, rank, attrs = {}, dependsOn, region } = conditions;
  const selector = create(SelectorSchema, {
    opType: text(conditions.opType, "opType", where),
    node: node instanceof Output ? nodeNameOfHandle(node, graph) : text(node, "node", where, "a string or a handle"),
    nodeRegex: text(conditions.nodeRegex, "nodeRegex", where),
    scope: text(conditions.scope, "scope", where),
    layer: text(conditions.layer, "layer", where),
  });
  if (conditions.nodes !== undefined) selector.nodes = nodeNames(conditions.nodes, where, graph);
  if (position !== undefined) selector.position = positionMessage(position, where);
  if (pattern !== undefined) selector.pattern = checkedPattern(pattern, where);
  if (dtype !== undefined) {
    if (!isDType(dtype)) throw invalid(`dtype of ${where} is ${listChoices(DTYPES)}, not ${formatValue(dtype)}.`);
    selector.dtype = dtypeNumber(dtype);
  }
  if (rank !== undefined) {
    if (rank !== rank >>> 0) throw invalid(`rank of ${where} is an integer from 0, not ${formatValue(rank)}.`);
    selector.rank = rank;
  }
  if (!isRecord(attrs)) throw invalid(`attrs of ${where} is an object of values by name, not ${formatValue(attrs)}.`);
  for (const [name, value] of Object.entries(attrs)) {
    selector.attrs[name] = attrValueForGroup(selector.opType || (selector.pattern.at(-1) ?? ""), name, value);
  }
  if (dependsOn !== undefined) selector.dependsOn = tensors(dependsOn, `dependsOn of ${where}`, graph);
  if (region !== undefined) {
    if (!isRecord(region)) throw invalid(`region of ${where} is { inputs, outputs }, not ${formatValue(region)}.`);
    checkProperties(region, ["inputs", "outputs"], `region of ${where}`);
    const inputs = tensors(region.inputs, `region.inputs of ${where}`, graph);
    selector.region = create(RegionSchema, {
      inputs,
      outputs: tensors(region.outputs, `region.outputs of ${where}`, graph),
    });
  }
  if (toBinary(SelectorSchema, selector).length === 0) {
    throw invalid(`${where} selects nothing; give opType, node, scope, pattern, region, or another condition.`);
  }
  return selector;
}

function positionMessage(position: Position, where: string): PositionMessage {
  if (typeof position === "number" && position === (position | 0)) {
    return create(PositionSchema, { place: { case: "index", value: position } });
  }
  if (typeof position === "string" && Object.hasOwn(NEAREST, position)) {
    return create(PositionSchema, { place: { case: "nearest", value: NEAREST[position] } });
  }
  throw invalid(
    `position of ${where} is ${listChoices(Object.keys(NEAREST))}, or an integer, not ${formatValue(position)}.`,
  );
}

function nodeNames(nodes: readonly (string | Output)[], where: string, graph: Graph | undefined): string[] {
  if (!Array.isArray(nodes) || nodes.length === 0) {
    throw invalid(`nodes of ${where} is a list of names and handles, not ${formatValue(nodes)}.`);
  }
  return nodes.map((node: string | Output) =>
    node instanceof Output ? nodeNameOfHandle(node, graph) : text(node, "nodes", where, "a string or a handle"),
  );
}

function checkedPattern(pattern: readonly string[], where: string): string[] {
  if (Array.isArray(pattern) && pattern.length > 0 && pattern.every((word) => typeof word === "string" && word)) {
    return [...pattern];
  }
  throw invalid(
    `pattern of ${where} is a list of op types such as ["MatMul", "BiasAdd"], not ${formatValue(pattern)}.`,
  );
}

function checkedRule(rule: RuleRef, where: string): RuleRef {
  if (typeof rule === "string") return namedOrRule(rule);
  if (isRecord(rule) && ("expression" in rule || "graph" in rule)) return rule;
  throw invalid(`${where} takes a rule's name, a formula, { expression } or { graph }, not ${formatValue(rule)}.`);
}

function tensors(names: Names, what: string, graph: Graph | undefined): string[] {
  const found = tensorNames(names, graph);
  if (found.length === 0) throw invalid(`${what} names no tensor; at least one is needed.`);
  return found;
}

function nodeNameOfHandle(handle: Output, graph: Graph | undefined): string {
  tensorName(handle, graph);
  return handle.node;
}

function text(value: unknown, what: string, where: string, kinds = "a string"): string {
  if (typeof value === "string") return value;
  if (value === undefined) return "";
  throw invalid(`${what} of ${where} is ${kinds}, not ${formatValue(value)}.`);
}

/** Refuses unknown properties, because ignoring one would make the override match more nodes. */
function checkProperties(given: object, known: readonly string[], what: string): void {
  const unknown = unknownProperty(given, known);
  if (unknown !== undefined) throw invalid(`${what} has ${unknown}, which is none of ${known.join(", ")}.`);
}

function isList(overrides: Overrides): overrides is readonly (Override | PresetChoice)[] {
  return Array.isArray(overrides);
}

function isPreset(entry: Override | PresetChoice): entry is PresetChoice {
  return "preset" in entry && entry.preset !== undefined;
}

function invalid(message: string): Error {
  return createError("INVALID_OVERRIDE", message);
}
