// Finds the server that the tests call.

import { after } from "node:test";

import { connect } from "../src/index.js";
import type { Client } from "../src/index.js";

/** Returns the address of the server. Throws if none is given, so that no test is skipped silently. */
export function target(): string {
  return given("GRADRULE_TARGET", "start `gradrule serve` and set it to its address");
}

/** Returns the address, certificate authority file and tokens of two tenants of a server with authentication. */
export function guarded(): { target: string; root: string; tokens: [string, string] } {
  const how = "start `gradrule serve --tls-cert … --tls-key … --tokens …` and set it";
  const [first, second] = given("GRADRULE_TEST_TOKENS", `${how} to two tenants' tokens, with a comma between`).split(
    ",",
  );
  return {
    target: given("GRADRULE_TEST_TLS_TARGET", `${how} to its address`),
    root: given("GRADRULE_TEST_TLS_CA", `${how} to the authority of its certificate`),
    tokens: [first!, second!],
  };
}

function given(variable: string, how: string): string {
  const value = process.env[variable];
  if (!value) throw new Error(`${variable} is not set: ${how}`);
  return value;
}

/** A client that is closed after the file's tests. */
export function client(): Client {
  const made = connect(target());
  after(() => made.close());
  return made;
}

let count = 0;

/** A rule name that no other test uses. */
export function freshName(prefix: string): string {
  return `${prefix}_${process.pid}_${++count}`;
}
