// Text of other people (rules, graphs, addresses, errors) is shown as text and never becomes elements of the page.
import { expect, test } from "./fixtures";
import type { Page } from "@playwright/test";

// Without the page's policy, which would stop scripts but hide that text became elements.
test.use({ bypassCSP: true });

const HIT = `"><img src=x data-hit onerror="window.hit=1"><svg data-hit onload="window.hit=1">`;

async function expectNothingRan(page: Page): Promise<void> {
  await expect(page.locator("main h1")).toBeVisible();
  // An image that fails to load runs its handler a moment later.
  await page.evaluate(() => new Promise((done) => setTimeout(done, 300)));
  expect(await page.evaluate(() => (window as unknown as { hit?: number }).hit)).toBeUndefined();
  await expect(page.locator("[data-hit]")).toHaveCount(0);
}

test("the check finds text that becomes elements", async ({ page, open }) => {
  await open("#/rules");
  await page.evaluate(
    (text) => document.querySelector("main")!.insertAdjacentHTML("beforeend", `<p title="${text}">`),
    HIT,
  );
  await expect(page.locator("[data-hit]")).not.toHaveCount(0);
  await expect.poll(() => page.evaluate(() => (window as unknown as { hit?: number }).hit)).toBe(1);
});

test("descriptions of rules and params are text", async ({ page, open, baseURL, token }) => {
  const answer = await page.request.post(`${baseURL}/v1/rules`, {
    headers: { Authorization: `Bearer ${token}` },
    data: {
      rule: {
        name: "rules/injected",
        description: HIT,
        definition: {
          expression: "dy * a",
          params: [{ name: "a", defaultValue: 1, description: HIT }],
        },
      },
    },
  });
  expect(answer.ok(), await answer.text()).toBe(true);
  for (const place of ["#/rules?search=injected", "#/rules/injected"]) {
    await open(place);
    await expect(page.getByRole("heading", { name: "injected" })).toBeVisible();
    await expectNothingRan(page);
  }
  await expect(page.getByText("data-hit").first()).toBeVisible();
});

test("names in addresses, and errors that repeat them, are text", async ({ page, open }) => {
  const name = encodeURIComponent(HIT);
  for (const place of [
    `#/rules/${name}`,
    `#/rules?search=${name}`,
    `#/programs/${name}`,
    `#/graphs?program=${name}`,
    `#/playground?e=${name}&op=${name}`,
    `#/${name}`,
  ]) {
    await open(place);
    await expectNothingRan(page);
  }
});

test("names of nodes and ops in a graph are text", async ({ page, open }) => {
  const name = HIT.replaceAll('"', "'");
  const dtype = 'attr { key: "dtype" value { type: DT_FLOAT } }';
  for (const [input, op, output] of [
    [name, "Square", "y"],
    ["x", name, "y"],
    ["x", "Square", name],
    ["x", "Square", "scope/" + name],
  ]) {
    const text = `node { name: "${input}" op: "Placeholder" ${dtype} }\nnode { name: "${output}" op: "${op}" input: "${input}" }`;
    await open("#/graphs");
    await page.getByLabel("Text or JSON").fill(text);
    await page.getByRole("button", { name: "Load text" }).click();
    await expect(page.getByText("data-hit").first()).toBeAttached();
    await expectNothingRan(page);
    await page.reload();
  }
});

test("rules of overrides, and findings that repeat them, are text", async ({ page, open }) => {
  await open("#/graphs");
  await page.getByRole("button", { name: /^Binary network/ }).click();
  await page.getByLabel("Rule", { exact: true }).fill(HIT);
  await expect(page.getByRole("alert")).toContainText("data-hit");
  await expectNothingRan(page);
});
