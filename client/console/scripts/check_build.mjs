// Fails if building the console changes the committed files.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const project = fileURLToPath(new URL("..", import.meta.url));
const committed = fileURLToPath(new URL("../../../server/gradrule_gateway/console", import.meta.url));
const built = mkdtempSync(join(tmpdir(), "console-"));

function files(folder) {
  const entries = readdirSync(folder, { recursive: true, withFileTypes: true });
  const paths = entries.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
  return new Map(paths.map((path) => [path.slice(folder.length + 1), readFileSync(path)]));
}

try {
  execFileSync("npx", ["vite", "build", "--logLevel=error"], {
    cwd: project,
    env: { ...process.env, CONSOLE_OUTPUT: built },
    stdio: "inherit",
  });
  const now = files(built);
  const before = files(committed);
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
}
