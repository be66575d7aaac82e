import { numberText } from "../api/numbers";
import type { Rule } from "../api/types";
import { ruleName } from "./rule-text";

/** How a rule is run as a function of one number. */
export interface Setup {
  /** Op of the rule. Without one, the rule runs alone. */
  opType?: string;
  /** Text of the forward function, with `x1` for the first further input; empty if there is none. */
  forward: string;
  /** Values of further inputs, `x1` first. */
  others: number[];
  /** Further inputs have the shape of x, not that of a single number. */
  othersLikeX?: boolean;
  low: number;
  high: number;
  /** The forward function is the step `x > 0`, which is a pattern of two ops. */
  isStep?: boolean;
  /** The rule depends on dy only: draw it over dy. */
  overDy?: boolean;
}

/** Tells why a rule is no function of one number. */
export class NoSetupError extends Error {}

const MAX_INPUTS = 9;

const DEFAULT: Setup = { forward: "", others: [], low: -3, high: 3 };

/** Names of ops and params come from users: an object would find `constructor`. */
function mapOf<Value>(entries: Record<string, Value>): ReadonlyMap<string, Value> {
  return new Map(Object.entries(entries));
}

function unary(low: number, high: number, ...opTypes: string[]): Record<string, Setup> {
  return Object.fromEntries(
    opTypes.map((name) => [name, { opType: name, forward: `${name}(x)`, others: [], low, high }]),
  );
}

function nary(opType: string, forward: string, ...others: number[]): Record<string, Setup> {
  return { [opType]: { opType, forward, others, low: -3, high: 3 } };
}

/** The step of spiking networks: Greater, then Cast. */
export const STEP = "@step";

/** Ops that map one number to one number; groups are represented by one of their ops. The same as in `gradrule rules plot`. */
export const SETUPS: ReadonlyMap<string, Setup> = mapOf({
  [STEP]: { ...DEFAULT, forward: "x > 0", isStep: true },
  ...unary(
    -3,
    3,
    "Sign",
    "Round",
    "Rint",
    "Floor",
    "Ceil",
    "Abs",
    "Identity",
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Softsign",
  ),
  ...unary(-3, 3, "Exp", "Square", "Sin", "Cos", "Neg", "Erf", "Expm1", "Sinh", "Cosh"),
  ...unary(-4, 4, "Sigmoid", "Tanh", "Softplus"),
  ...unary(-3, 9, "Relu6"),
  ...unary(0.05, 4, "Log", "Rsqrt", "Reciprocal", "Inv"),
  ...unary(0, 4, "Sqrt"),
  ...unary(-0.9, 4, "Log1p"),
  ...nary("Minimum", "Minimum(x, x1)", 1),
  ...nary("Maximum", "Maximum(x, x1)", -1),
  ...nary("ClipByValue", "ClipByValue(x, x1, x2)", -1, 1),
  ...nary("RealDiv", "x / x1", 2),
  ...nary("DivNoNan", "DivNoNan(x, x1)", 2),
  ...nary("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVars(x, x1, x2)", -1, 1),
  "@activation": { ...DEFAULT, opType: "Relu", forward: "Relu(x)" },
});

const WITHOUT_SETUP: ReadonlyMap<string, string> = mapOf({
  "@linear": "it is for layers with weights",
  "@sum": "it distributes dy among the inputs of a sum or a pool",
  MaxPool: "a pool reads several numbers at once",
  SelfAdjointEigV2: "its input is a matrix",
});

/** Example values for params of builtin rules that have no default. */
export const EXAMPLE_PARAMS: ReadonlyMap<string, number> = mapOf({
  ...{ seed: 0, step: 0, lo: -1, hi: 1, low: -1, high: 1, factor: 0.5, mask: 1, levels: 2, qn: -2, qp: 1 },
});

/**
 * Returns the setup of an op type.
 *
 * @param opType Empty: the expression runs alone.
 * @param expression Its variables tell the number of inputs, unless the op is known.
 * @param given Values of further inputs, `x1` first; missing ones have an example value. An op that is not known has at least these.
 * @throws NoSetupError if the group has no op of one number.
 */
export function setupOfOp(opType: string, expression: string, given: readonly number[]): Setup {
  const known = SETUPS.get(opType);
  if (!known && opType.startsWith("@")) throw new NoSetupError(`no op of ${opType} maps one number to one number`);
  if (known) return { ...known, others: known.others.map((value, index) => given[index] ?? value) };
  const count = Math.max(furtherInputs(expression), opType ? given.length : 0);
  const others = Array.from({ length: count }, (_, index) => given[index] ?? 1);
  const all = ["x", ...others.map((_, index) => `x${index + 1}`)].join(", ");
  return { ...DEFAULT, ...(opType ? { opType, forward: `${opType}(${all})` } : {}), others, othersLikeX: true };
}

/** Returns how many inputs an expression uses besides x. */
export function furtherInputs(expression: string): number {
  const numbers = [...expression.matchAll(/\bx([1-9]\d*)\b/g)].map((found) => Number(found[1]));
  return Math.min(Math.max(0, ...numbers), MAX_INPUTS);
}

/** Returns the text of the forward function with the values of further inputs. */
export function forwardText({ forward, others }: Setup): string {
  return forward.replace(/\bx([1-9]\d*)\b/g, (name, index) => {
    const value = others[Number(index) - 1];
    return value === undefined ? name : numberText(value);
  });
}

/** Returns the setup that suits a registered rule. Throws NoSetupError. */
export function setupOfRule(rule: Rule): Setup {
  const name = ruleName(rule);
  if (rule.kind === "RULE_KIND_OP") {
    const setup = SETUPS.get(name);
    if (!setup) throw new NoSetupError("open the playground to run it with inputs of your own");
    return setup;
  }
  const opTypes = rule.opTypes ?? [];
  const known = opTypes.find((opType) => SETUPS.has(opType));
  if (known) return { ...SETUPS.get(known)!, overDy: known === "Identity" && needsOnlyDy(rule) };
  const first = opTypes[0];
  if (first) throw new NoSetupError(WITHOUT_SETUP.get(first) ?? `it is for ${first}`);
  if (name === "lsq") return { ...DEFAULT, others: [0.5] };
  const expression = rule.definition?.expression ?? "";
  if (/\b(y|default)\d*\b/.test(expression))
    throw new NoSetupError("it needs an op: open it in the playground and choose one");
  return { ...setupOfOp("", expression, []), overDy: needsOnlyDy(rule) };
}

/** Tells whether an expression uses dy but no other variable. */
export function usesOnlyDy(expression: string): boolean {
  return expression !== "" && !/\b(x|y|default)\d*\b/.test(expression);
}

function needsOnlyDy(rule: Rule): boolean {
  return usesOnlyDy(rule.definition?.expression ?? "");
}
