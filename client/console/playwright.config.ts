import { defineConfig } from "@playwright/test";

export default defineConfig({
  testDir: "test",
  globalSetup: "./test/servers.ts",
  outputDir: "test-results",
  reporter: "line",
  workers: 2,
  fullyParallel: true,
  // Machines of CI are shared: an answer may take long, and only a missing one fails a test.
  timeout: 90_000,
  globalTimeout: 15 * 60_000,
  maxFailures: 10,
  expect: { timeout: 20_000 },
  use: {
    launchOptions: {
      // The system's Chromium; `make test-console` installs it where it can.
      executablePath: process.env["CHROMIUM"] ?? "/usr/bin/chromium",
      args: [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
      ],
    },
  },
});
