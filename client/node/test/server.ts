// The real server that the service tests run against.

import { after } from "node:test";

import { connect } from "../src/index.js";
import type { Client } from "../src/index.js";

/** Address of the server; fails loudly where none is given, for a test that runs nothing proves nothing. */
export function target(): string {
  const address = process.env["GRADRULE_TARGET"];
  if (!address) throw new Error("GRADRULE_TARGET is not set: start `gradrule serve` and set it to its address");
  return address;
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
