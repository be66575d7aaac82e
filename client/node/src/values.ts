// Checks arguments and formats them for error messages.

import { inspect } from "node:util";

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
