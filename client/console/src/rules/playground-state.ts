import type { Rule, RuleDefinition } from "../api/types";
import { defaultOf, ruleName } from "./rule-text";
import { EXAMPLE_PARAMS, SETUPS } from "./setups";

export interface PlaygroundParam {
  name: string;
  value: number;
}

/** What somebody typed into the playground. The address holds it, so a link or the back button brings it back. */
export interface PlaygroundState {
  expression: string;
  opType: string;
  params: PlaygroundParam[];
  /** Values of further inputs that somebody chose, `x1` first. */
  others: number[];
  /** Range of the curve; undefined: the op's. */
  range?: { low: number; high: number } | undefined;
}

const FIRST: PlaygroundState = {
  expression: "where(abs(x) <= width, dy, 0)",
  opType: "Sign",
  params: [{ name: "width", value: 1 }],
  others: [],
};

/** Reads the state of an address. */
export function readState(query: URLSearchParams): PlaygroundState {
  const expression = query.get("e");
  if (expression === null) return FIRST;
  const params = [...query.entries()].filter(([key]) => key.startsWith("p."));
  const [low, high] = [query.get("from"), query.get("to")];
  return {
    expression,
    opType: query.get("op") ?? "",
    params: params.map(([key, value]) => ({ name: key.slice(2), value: Number(value) })),
    others: query.getAll("x").map(Number),
    range: low === null || high === null ? undefined : { low: Number(low), high: Number(high) },
  };
}

/** Returns the address of a state. */
export function stateLink({ expression, opType, params, others, range }: PlaygroundState): string {
  const query = new URLSearchParams({ e: expression });
  if (opType) query.set("op", opType);
  for (const { name, value } of params) query.append(`p.${name}`, String(value));
  for (const value of others) query.append("x", String(value));
  if (range) {
    query.set("from", String(range.low));
    query.set("to", String(range.high));
  }
  return `#/playground?${query}`;
}

/** Returns the link that opens a rule in the playground. */
export function playgroundLink(rule: Rule): string {
  const opTypes = rule.opTypes ?? [];
  const opType = opTypes.find((name) => SETUPS.has(name)) ?? (rule.kind === "RULE_KIND_OP" ? ruleName(rule) : "");
  return stateLink({
    expression: rule.definition?.expression ?? "default",
    opType,
    params: (rule.definition?.params ?? []).map((param) => ({
      name: param.name,
      value: defaultOf(param) ?? EXAMPLE_PARAMS.get(param.name) ?? 1,
    })),
    others: [],
  });
}

/** Returns the rule definition of a state. */
export function definitionOf({ expression, params }: PlaygroundState): RuleDefinition {
  const named = params.filter((param) => param.name);
  return {
    expression,
    ...(named.length
      ? {
          params: named.map(({ name, value }) => ({
            name,
            defaultValue: Number.isFinite(value) ? value : (String(value) as "NaN"),
          })),
        }
      : {}),
  };
}
