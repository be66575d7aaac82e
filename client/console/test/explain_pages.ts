import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import type { GraphData } from "../src/graphs/view/graph_data";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));

/** Writes the pages of explained graphs with the Python client; returns their folder. */
export function writePages(): string {
  const folder = mkdtempSync(join(tmpdir(), "explain-"));
  const python = process.env["PYTHON"] ?? join(ROOT, ".venv/bin/python");
  execFileSync(python, ["-m", "tests.unit.client.picture.write_pages", folder], { cwd: ROOT, stdio: "inherit" });
  return folder;
}

/** Reads what a page of `writePages` draws. */
export function readGraph(folder: string, name: string): GraphData {
  return JSON.parse(readFileSync(join(folder, `${name}.json`), "utf8")) as GraphData;
}
