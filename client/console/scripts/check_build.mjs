// Fails if building the console, or the page of an explained graph, changes the committed files.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const project = fileURLToPath(new URL("..", import.meta.url));
const committed = fileURLToPath(new URL("../../../server/gradrule_gateway/console", import.meta.url));
const explain = fileURLToPath(new URL("../../python/gradrule/_picture", import.meta.url));
const built = mkdtempSync(join(tmpdir(), "console-"));
const builtExplain = mkdtempSync(join(tmpdir(), "explain-"));

function files(folder, pattern = /./) {
  const entries = readdirSync(folder, { recursive: true, withFileTypes: true });
  const paths = entries
    .filter((entry) => entry.isFile() && pattern.test(entry.name))
    .map((entry) => join(entry.parentPath, entry.name));
  return new Map(paths.map((path) => [path.slice(folder.length + 1), readFileSync(path)]));
}

try {
  for (const config of ["vite.config.ts", "vite.explain.config.ts"]) {
    execFileSync("npx", ["vite", "build", "--logLevel=error", "--config", config], {
      cwd: project,
      env: { ...process.env, CONSOLE_OUTPUT: built, EXPLAIN_OUTPUT: builtExplain },
      stdio: "inherit",
    });
  }
  const page = /^graph_page\./;
  const now = new Map([...files(built), ...files(builtExplain, page)]);
  const before = new Map([...files(committed), ...files(explain, page)]);
  const names = [...new Set([...now.keys(), ...before.keys()])].sort();
  const changed = names.filter(
    (name) => !now.has(name) || !before.has(name) || !now.get(name).equals(before.get(name)),
  );
  if (changed.length) {
    console.error(
      `Not up to date: ${changed.join(", ")}. Run \`npm run build\` in client/console and commit the result.`,
    );
    process.exitCode = 1;
  }
} finally {
  rmSync(built, { recursive: true });
  rmSync(builtExplain, { recursive: true });
}
