import { encodeNumber, decodeNumber, numberText } from "../api/numbers";
import type { Rule, RuleDefinition, RuleParam } from "../api/types";
import { EXAMPLE_PARAMS } from "./setups";

export const FAMILIES: Readonly<Record<string, string>> = {
  straight_through: "Straight-through",
  surrogate: "Surrogate gradients",
  attribution: "Attribution",
  flow: "Gradient flow",
  stable: "Numerically stable",
};

/** What a family is for. */
export const PURPOSES: Readonly<Record<string, string>> = {
  straight_through: "Quantisation and rounding",
  surrogate: "Spiking and binary networks",
  attribution: "Which inputs a result depends on",
  flow: "Domain adaptation, clipping, hygiene",
  stable: "True gradients without overflow",
};

/** Returns a rule's name without its collection. */
export function ruleName(rule: Rule): string {
  return rule.name.replace(/^rules\//, "");
}

/** Returns what a rule computes, as text. */
export function formulaOf(rule: Rule): string {
  if (rule.formula) return rule.formula;
  if (rule.definition?.expression) return rule.definition.expression;
  return rule.kind === "RULE_KIND_OP" ? "TensorFlow’s own gradient" : "a graph";
}

/** Returns a param's default; undefined if it has none or if it is a tensor. */
export function defaultOf(param: RuleParam): number | undefined {
  const value = param.defaultValue;
  return value === undefined || typeof value === "object" ? undefined : decodeNumber(value);
}

/** Formats a param's default for a table. */
export function defaultText(param: RuleParam): string {
  if (param.defaultValue === undefined) return "required";
  if (typeof param.defaultValue === "object") return "a tensor";
  return numberText(decodeNumber(param.defaultValue));
}

/** An override with a rule, as text to copy. */
export interface Snippets {
  python: string;
  json: string;
}

/** Returns an override that uses a rule, in Python and as an entry of `overrides` in a request to the gateway. */
export function snippetsOf(rule: Rule): Snippets {
  const name = ruleName(rule);
  const opType = rule.kind === "RULE_KIND_OP" ? "YourOp" : (rule.opTypes?.[0] ?? "Identity");
  const missing = (rule.definition?.params ?? []).filter((param) => param.defaultValue === undefined);
  const params = Object.fromEntries(missing.map((param) => [param.name, EXAMPLE_PARAMS.get(param.name) ?? 1]));
  const selector = opType === "@linear" ? { layer: opType } : { opType };
  return {
    python: pythonOverride(opType, `"${name}"`, params),
    json: json({ selector, rule: name, ...(missing.length ? { params } : {}) }),
  };
}

/** Returns an override that uses an expression, in Python and in JSON. */
export function snippetsOfDefinition(definition: RuleDefinition, opType: string): Snippets {
  const expression = definition.expression ?? "";
  const numbers = Object.fromEntries((definition.params ?? []).map((param) => [param.name, defaultOf(param) ?? 1]));
  const quoted = JSON.stringify(expression);
  const rule = Object.keys(numbers).length ? `gr.Rule(${quoted}, params=${pythonDict(numbers)})` : `gr.Rule(${quoted})`;
  return {
    python: pythonOverride(opType || "Identity", rule, {}),
    json: json({ selector: { opType: opType || "Identity" }, definition }),
  };
}

function pythonOverride(opType: string, rule: string, params: Record<string, number>): string {
  const hasParams = Object.keys(params).length > 0;
  if (opType === "@linear") {
    return `overrides=[gr.Override(${rule}, layer="@linear"${hasParams ? `, params=${pythonDict(params)}` : ""})]`;
  }
  return `overrides={"${opType}": ${hasParams ? `(${rule}, ${pythonDict(params)})` : rule}}`;
}

function pythonDict(values: Record<string, number>): string {
  return `{${Object.entries(values)
    .map(([name, value]) => `"${name}": ${pythonNumber(value)}`)
    .join(", ")}}`;
}

function pythonNumber(value: number): string {
  if (Number.isNaN(value)) return 'float("nan")';
  if (!Number.isFinite(value)) return value > 0 ? 'float("inf")' : 'float("-inf")';
  return String(value);
}

function json(value: unknown): string {
  return JSON.stringify(value, (_, item: unknown) => (typeof item === "number" ? encodeNumber(item) : item), 2);
}
