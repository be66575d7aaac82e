// Values that a caller gave: what they are, and how a message shows them.

import { inspect } from "node:util";

/** Whether a value is an object of entries by name; a Map or an array would look empty or numbered. */
export function isRecord(value: unknown): value is object {
  return typeof value === "object" && value !== null && !(Symbol.iterator in value);
}

/** A value in a message, in few words. */
export function shown(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value);
  return inspect(value, { depth: 1, maxArrayLength: 6, maxStringLength: 80, breakLength: Number.POSITIVE_INFINITY });
}

/** `"error", "pass" or "zero"`, in a message. */
export function oneOf(words: readonly string[]): string {
  const quoted = words.map((word) => JSON.stringify(word));
  return quoted.length < 2 ? quoted.join("") : `${quoted.slice(0, -1).join(", ")} or ${quoted.at(-1)}`;
}
