// Checks arguments and formats them for error messages.

import { inspect } from "node:util";

import { createError } from "./errors.js";

/** Returns whether a value is a plain object. A Map would look empty, an array would have numbers as keys. */
export function isRecord(value: unknown): value is object {
  return typeof value === "object" && value !== null && !(Symbol.iterator in value);
}

/** Formats a value for an error message, shortened. */
export function formatValue(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value);
  return inspect(value, { depth: 1, maxArrayLength: 6, maxStringLength: 80, breakLength: Number.POSITIVE_INFINITY });
}

/** Formats allowed values for an error message: `"error", "pass" or "zero"`. */
export function listChoices(words: readonly string[]): string {
  const quoted = words.map((word) => JSON.stringify(word));
  return quoted.length < 2 ? quoted.join("") : `${quoted.slice(0, -1).join(", ")} or ${quoted.at(-1)}`;
}

/** Returns the first property that is set and not known. */
export function unknownProperty(given: object, known: readonly string[]): string | undefined {
  return Object.entries(given).find(([name, value]) => value !== undefined && !known.includes(name))?.[0];
}

/** Names of all options of an interface. */
export type OptionNames<T> = Readonly<Record<keyof T, true>>;

/** Refuses unknown options of a method: ignoring `override` for `overrides` would give other gradients. Throws INVALID_PARAM. */
export function checkOptions(given: object, known: Readonly<Record<string, true>>, method: string): void {
  if (!isRecord(given)) {
    throw createError("INVALID_PARAM", `The options of ${method} are an object, not ${formatValue(given)}.`);
  }
  const names = Object.keys(known);
  const wrong = unknownProperty(given, names);
  if (wrong === undefined) return;
  const start = wrong.toLowerCase().slice(0, 4);
  const near = names.find((name) => name.toLowerCase().startsWith(start));
  throw createError(
    "INVALID_PARAM",
    `${method} has no option ${wrong}.${near === undefined ? "" : ` Did you mean ${near}?`} Options: ${names.join(", ")}.`,
  );
}
