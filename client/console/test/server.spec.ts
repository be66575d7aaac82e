import { expect, test } from "./fixtures";

test("the state of the server is live while the page is not paused", async ({ page, open }) => {
  const asked: number[] = [];
  page.on("request", (request) => request.url().endsWith("/v1/status") && asked.push(Date.now()));
  await open("#/server");
  const engines = page.getByRole("region", { name: "Table of engines" }).getByRole("row");
  await expect(engines.nth(1)).toContainText("ready");
  await expect(engines.nth(1)).toContainText("CPU:0");
  await expect.poll(() => asked.length).toBeGreaterThan(1);
  await expect(page.getByRole("region", { name: "Table of tenants" })).toContainText("ada");
  await expect(page.getByRole("region", { name: "Table of latencies" })).toContainText("GET /v1/status");
  await page.getByRole("button", { name: "Pause" }).click();
  await expect(page.getByRole("button", { name: "Resume" })).toHaveAttribute("aria-pressed", "true");
});

test("a state that is no longer known is marked as old", async ({ page, open }) => {
  await open("#/server");
  const state = page.locator(".tile", { hasText: "State" });
  await expect(state).toContainText("ready");
  await page.route("**/v1/status", (route) => route.abort());
  await expect(page.getByRole("alert")).toContainText("The gateway does not answer");
  await expect(page.getByText("This was the state at")).toBeVisible();
  await expect(state).toContainText("unknown");
  await page.unroute("**/v1/status");
  await page.getByRole("button", { name: "Try again" }).click();
  await expect(state).toContainText("ready");
});

test("the time in the queue and in the engine is the server's, as a median", async ({ page, open }) => {
  const times = [
    { queue: "0.002s", run: "0.0301s" },
    { queue: "0.004500s", run: "0.5s" },
    { queue: "0.1s", run: "0.0402s" },
  ];
  let calls = 0;
  await page.route("**/v1/evaluate", async (route) => {
    const answer = (await (await route.fetch()).json()) as { timings: Record<string, string> };
    for (const name of ["queue", "run"]) expect(answer.timings[name]).toMatch(/^[\d.]+s$/);
    Object.assign(answer.timings, times[calls++]);
    await route.fulfill({ json: answer });
  });
  await open("#/graphs?program=binary-net");
  for (const count of [1, 2, 3]) {
    await page.getByRole("button", { name: "Run" }).click();
    await expect.poll(() => calls).toBe(count);
    await expect(page.getByRole("region", { name: "Gradient of x" })).toBeVisible();
  }
  await page.getByRole("link", { name: "Server" }).click();
  const row = page.getByRole("region", { name: "Table of latencies" }).getByRole("row", { name: /evaluate/ });
  await expect(row.getByRole("cell")).toHaveText(["3", "0", /^[\d.]+$/, /^[\d.]+$/, "4.5", "40.2"]);
  // Calls other than evaluations do not tell it.
  const other = page.getByRole("row", { name: "GET /v1/programs/{name}" });
  await expect(other.getByRole("cell").nth(4)).toHaveText("");
});

test("quarantined programs are listed with reason and time", async ({ page, open }) => {
  await page.route("**/v1/status", async (route) => {
    const answer = (await (await route.fetch()).json()) as { status: Record<string, unknown> };
    answer.status["quarantinedPrograms"] = [{ digest: "0123abcd", reason: "2 crashes", remaining: "90.5s" }];
    answer.status["quarantinedProgramCount"] = 7;
    await route.fulfill({ json: answer });
  });
  await open("#/server");
  await expect(page.getByRole("region", { name: "Table of quarantined programs" }).getByRole("row").nth(1)).toHaveText(
    "0123abcd2 crashes1 min 31 s",
  );
  await expect(page.getByText("1 of 7 are shown.")).toBeVisible();
});

test.describe("of a caller who is no administrator", () => {
  test.use({ token: async ({}, use) => use(process.env["CONSOLE_PLAIN_TOKEN"]!) });

  test("the page says so, and asks the server only once", async ({ page, open }) => {
    let asked = 0;
    page.on("request", (request) => request.url().endsWith("/v1/status") && (asked += 1));
    await open("#/server");
    await expect(page.getByRole("alert")).toContainText("This token has no access");
    await page.getByRole("link", { name: "Programs" }).click();
    await expect(page.getByRole("heading", { name: "Programs" })).toBeVisible();
    expect(asked).toBe(1);
  });
});
