// TLS, tokens, and what is not sent where others could read it.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

import { connect, errors, tls } from "../src/index.js";
import type { Client, ConnectOptions } from "../src/index.js";
import { freshName, guarded } from "./server.js";

async function using<T>(options: ConnectOptions, use: (client: Client) => Promise<T>, target = guarded().target) {
  const client = connect(target, { timeout: 20, ...options });
  try {
    return await use(client);
  } finally {
    client.close();
  }
}

test("TLS and a token open the door", async () => {
  const { root, tokens } = guarded();
  for (const form of [root, await readFile(root)]) {
    await using({ credentials: tls({ root: form }), token: tokens[0] }, async (client) => {
      assert.equal((await client.getRule("ste")).name, "ste");
      const sampled = await client.sampleRule({ expression: "2 * dy" }, { x: [1], dy: [3] });
      assert.deepEqual(sampled.gradients["dx"]!.toArray(), [6]);
    });
  }
});

test("each token has its own tenant", async () => {
  const { root, tokens } = guarded();
  const [first, second] = tokens.map((token) => ({ credentials: tls({ root }), token }));
  const name = freshName("mine");
  await using(first!, async (client) => {
    await client.createRule(name, "3 * dy");
    await using(second!, (other) => assert.rejects(other.getRule(name), errors.UnknownRuleError));
    await client.deleteRule(name);
  });
});

test("whoever has no token, or a wrong one, is told the same", async () => {
  const credentials = tls({ root: guarded().root });
  const said = new Set<string>();
  for (const options of [{ credentials }, { credentials, token: `gr_${"x".repeat(43)}` }]) {
    await using(options, (client) =>
      assert.rejects(client.getRule("ste"), (failure: Error) => {
        assert.ok(failure instanceof errors.UnauthenticatedError);
        said.add(failure.message);
        return true;
      }),
    );
  }
  assert.equal(said.size, 1);
});

test("a server that nobody vouches for, or that speaks no TLS, gets nothing", async () => {
  const { tokens } = guarded();
  const signed = { token: tokens[0], timeout: 20 };
  await using({ ...signed, credentials: tls() }, (client) =>
    assert.rejects(client.getRule("ste"), errors.UnavailableError),
  );
  await using(signed, (client) => assert.rejects(client.getRule("ste"), errors.UnavailableError));
});

test("a token does not leave this machine unencrypted", () => {
  for (const target of [
    "gradrule.example:8470",
    "dns:///10.0.0.1:8470",
    "ipv4:127.0.0.1:1,10.0.0.1:2",
    "127.evil.example",
  ]) {
    assert.throws(() => connect(target, { token: "t" }), /unencrypted/);
    connect(target, { token: "t", insecureToken: true }).close();
    connect(target, { token: "t", credentials: tls() }).close();
    connect(target).close();
  }
  for (const target of ["localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1", "::1"]) {
    connect(target, { token: "t" }).close();
  }
});

test("texts that are no token, and halves of a certificate", () => {
  for (const token of ["", "two words", "line\n", "\u2603"]) {
    assert.throws(() => connect("localhost:1", { token }), errors.InvalidParamError);
  }
  assert.throws(() => tls({ certificate: Buffer.from("") }), errors.InvalidParamError);
});
