// Starts a server with tokens and a gateway for all tests, and stores what they look at.
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const RULES = {
  name: "rules/window",
  description: "Straight-through gradient within `clip`.",
  definition: {
    expression: "where(abs(x) <= clip, dy, 0)",
    params: [{ name: "clip", defaultValue: 1, description: "half width", range: "> 0" }],
  },
};

export default async function start(): Promise<() => Promise<void>> {
  const folder = mkdtempSync(join(tmpdir(), "gradrule-console-"));
  const tokens = join(folder, "tokens.jsonl");
  const admin = await output(["token", "new", "--tenant", "ada", "--admin", "--file", tokens]);
  const plain = await output(["token", "new", "--tenant", "bob", "--file", tokens]);
  const server = run([
    "serve",
    "--port",
    "0",
    "--tokens",
    tokens,
    "--data-dir",
    join(folder, "data"),
    "--log-level",
    "warning",
  ]);
  const address = await listening(server);
  const gateway = run(["gateway", "--port", "0", "--server", address]);
  const url = await listening(gateway);
  process.env["CONSOLE_URL"] = url;
  process.env["CONSOLE_ADMIN_TOKEN"] = admin;
  process.env["CONSOLE_PLAIN_TOKEN"] = plain;
  await store(url, admin);
  return async () => {
    for (const child of [gateway, server]) {
      child.kill("SIGTERM");
      if (child.exitCode === null && child.signalCode === null) await once(child, "exit");
    }
    rmSync(folder, { recursive: true });
  };
}

/** Stores two programs and a rule. */
async function store(url: string, token: string): Promise<void> {
  const post = async (path: string, body: unknown) => {
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
    const answer = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
    if (!answer.ok) throw new Error(`${path}: ${await answer.text()}`);
  };
  await post("/v1/rules", { rule: RULES });
  for (const [id, rule] of [
    ["binary-net", "ste"],
    ["spare-net", "ste_sign"],
  ]) {
    const graph = {
      node: [
        {
          name: "x",
          op: "Placeholder",
          attr: { dtype: { type: "DT_FLOAT" }, shape: { shape: { dim: [{ size: "-1" }, { size: "3" }] } } },
        },
        { name: "layer/sign", op: "Sign", input: ["x"], attr: { T: { type: "DT_FLOAT" } } },
        { name: "y", op: "Square", input: ["layer/sign"], attr: { T: { type: "DT_FLOAT" } } },
      ],
    };
    const overrides = [{ selector: { opType: "Sign" }, rule }];
    await post("/v1/programs", {
      programId: id,
      spec: { graph: { inlineGraph: graph }, overrides, vjp: { ys: ["y"], xs: ["x"] } },
    });
  }
}

function run(args: string[]): ChildProcess {
  return spawn("gradrule", args, { stdio: ["ignore", "pipe", "pipe"] });
}

async function output(args: string[]): Promise<string> {
  const child = run(args);
  let text = "";
  child.stdout!.on("data", (data: Buffer) => (text += data.toString()));
  await once(child, "close");
  return text.trim();
}

/** Waits until a process tells the address that it listens on. */
async function listening(child: ChildProcess): Promise<string> {
  let text = "";
  return new Promise((resolve, reject) => {
    const read = (data: Buffer) => {
      text += data.toString();
      const found = text.match(/listening on (\S+)/)?.[1];
      if (found) resolve(found);
    };
    child.stdout!.on("data", read);
    child.stderr!.on("data", read);
    child.once("exit", () => reject(new Error(`gradrule ended: ${text}`)));
  });
}
