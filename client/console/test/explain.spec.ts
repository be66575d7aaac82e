import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { expect, type Page, test } from "@playwright/test";
import { writePages } from "./explain_pages";
import { accessibilityProblems } from "./fixtures";

// The page of `gradrule explain --html`, opened as a file.
let folder: string;
test.beforeAll(() => {
  folder = writePages();
});

async function open(page: Page, name: string): Promise<void> {
  const problems: string[] = [];
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("request", (request) => request.url().startsWith("file:") || problems.push(`requested ${request.url()}`));
  await page.goto(pathToFileURL(join(folder, `${name}.html`)).href);
  await expect(page.locator("[data-box]").first()).toBeVisible();
  expect(problems).toEqual([]);
}

const box = (page: Page, title: string) => page.locator(`[data-box][aria-label^="${title},"]`);
const details = (page: Page) => page.getByRole("complementary", { name: "Details" });
const scale = (page: Page) => page.locator(".gv-space").evaluate((space) => (space as SVGGElement).getCTM()!.a);

test("opens with the whole graph at the level of its stages, in readable text", async ({ page }) => {
  await open(page, "layered");
  const names = await page
    .locator("[data-box]")
    .evaluateAll((all) => all.map((each) => each.getAttribute("aria-label")));
  expect(names.map((name) => name!.split(",")[0])).toEqual(
    expect.arrayContaining(["keras_tensor", "conv1", "conv2", "head/MatMul", "Identity"]),
  );
  const window = (await page.locator(".gv-canvas").boundingBox())!;
  for (const at of await page.locator("[data-box] > .body").all()) {
    const place = (await at.boundingBox())!;
    expect(place.y).toBeGreaterThanOrEqual(window.y);
    expect(place.y + place.height).toBeLessThanOrEqual(window.y + window.height + 1);
    expect(place.x).toBeGreaterThanOrEqual(window.x);
    expect(place.x + place.width).toBeLessThanOrEqual(window.x + window.width + 1);
  }
  const sizes = await page
    .locator(".gv text")
    .evaluateAll((texts) => texts.map((text) => parseFloat(getComputedStyle(text).fontSize)));
  expect(Math.min(...sizes)).toBeGreaterThanOrEqual(12);
  expect(await scale(page)).toBeGreaterThan(0.84);
  // The y has the name of the request, not of the graph's last node.
  await expect(page.getByText("predictions", { exact: true })).toBeVisible();
});

test("a click on a node shows its rule and why", async ({ page }) => {
  await open(page, "nested");
  await box(page, "aside").click();
  for (const text of ["guided_relu", "Relu", "off path", "not on the path"])
    await expect(details(page)).toContainText(text);
  await box(page, "y").click();
  await expect(page.locator('.edge.near[marker-end="url(#gv-near)"]')).toHaveCount(2);
  await expect(details(page)).toContainText("its own");
  await expect(details(page)).not.toContainText("guided_relu");
  await page.getByRole("button", { name: "Close details" }).click();
  await expect(details(page)).toBeHidden();
});

test("scopes unfold and fold by click and by keys, and keep the focus", async ({ page }) => {
  await open(page, "nested");
  await page.getByRole("button", { name: "Fold all scopes" }).click();
  await expect(page.locator("[data-box]")).toHaveCount(9);
  const loop = page.getByRole("button", { name: "loop, 6 nodes" });
  const before = (await loop.boundingBox())!;
  await loop.click();
  await expect(loop).toHaveAttribute("aria-expanded", "true");
  await expect(loop).toBeFocused();
  // The clicked box stays under the pointer.
  expect(Math.abs((await loop.boundingBox())!.y - before.y)).toBeLessThan(3);
  expect(await page.locator("[data-box]").count()).toBeGreaterThan(9);
  await page.keyboard.press("Enter");
  await expect(loop).toHaveAttribute("aria-expanded", "false");
  await expect(loop).toBeFocused();
  await expect(page.locator("[data-box]")).toHaveCount(9);
  await page.keyboard.press(" ");
  await expect(loop).toHaveAttribute("aria-expanded", "true");
});

test("everything can be reached with the keyboard", async ({ page }) => {
  await open(page, "nested");
  await page.getByRole("button", { name: "Fold all scopes" }).click();
  await box(page, "x").focus();
  const seen = new Set<string>();
  for (const key of ["ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"]) {
    await page.keyboard.press(key);
    seen.add((await page.evaluate(() => document.activeElement!.getAttribute("aria-label")))!);
  }
  expect(seen.size).toBeGreaterThanOrEqual(3);
  // One stop of the Tab key for all boxes.
  await expect(page.locator('[data-box][tabindex="0"]')).toHaveCount(1);
  const before = await scale(page);
  await page.keyboard.press("-");
  expect(await scale(page)).toBeCloseTo(before * 0.8);
  await page.keyboard.press("/");
  await expect(page.getByRole("searchbox")).toBeFocused();
});

test("search unfolds, marks and counts hits", async ({ page }) => {
  await open(page, "large");
  const search = page.getByRole("searchbox");
  await search.fill("op_1234");
  await expect(page.locator(".gv-found")).toHaveText("1 of 11");
  await expect(page.locator(".current")).toHaveCount(1);
  await expect(page.locator(".current")).toBeInViewport();
  await expect(details(page)).toContainText("op_1234");
  await search.press("Enter");
  await expect(page.locator(".gv-found")).toHaveText("2 of 11");
  await search.press("Shift+Enter");
  await expect(page.locator(".gv-found")).toHaveText("1 of 11");
  await search.fill("no such node");
  await expect(page.locator(".gv-found")).toHaveText("none");
  await expect(page.locator(".hit")).toHaveCount(0);
  await search.fill("");
  await expect(page.locator(".gv-found")).toHaveText("");
});

test("the legend leads to the nodes of a rule", async ({ page }) => {
  await open(page, "nested");
  await page.getByRole("button", { name: "Fold all scopes" }).click();
  await page.getByRole("button", { name: /ste_sign/ }).click();
  await expect(page.locator(".hit.current")).toHaveAttribute("aria-label", /^loop\/s,/);
  for (const text of ["Sign", "ste_sign", "active", "body"]) await expect(details(page)).toContainText(text);
});

test("the legend explains the lines of this graph only", async ({ page }) => {
  const legend = page.getByRole("complementary", { name: "Legend" });
  await open(page, "nested");
  for (const text of ["off the path", "not differentiable"]) await expect(legend).toContainText(text);
  await open(page, "layered");
  await expect(legend).toContainText("not on the path");
  for (const text of ["off the path", "not differentiable"]) await expect(legend).not.toContainText(text);
});

test("rules differ by letters and by colours", async ({ page }) => {
  await page.setViewportSize({ width: 1900, height: 1200 });
  await open(page, "nested");
  const found = await page.locator("[data-box].rule").evaluateAll((boxes) =>
    boxes.map((each) => ({
      letter: each.querySelector("text.mark")!.textContent,
      fill: getComputedStyle(each.querySelector(".body")!).fill,
      mark: getComputedStyle(each.querySelector("rect.mark")!).fill,
    })),
  );
  expect(found.map(({ letter }) => letter).sort()).toEqual(["A", "B", "C"]);
  expect(new Set(found.map(({ mark }) => mark)).size).toBe(3);
  expect(new Set(found.map(({ fill }) => fill)).size).toBe(3);
});

test("the wheel zooms at the pointer, dragging moves, Fit shows everything", async ({ page }) => {
  await open(page, "nested");
  const y = box(page, "y");
  const before = (await y.boundingBox())!;
  const middle = { x: before.x + before.width / 2, y: before.y + before.height / 2 };
  await page.mouse.move(middle.x, middle.y);
  await page.mouse.wheel(0, -300);
  await expect.poll(() => scale(page)).toBeGreaterThan(1.2);
  const after = (await y.boundingBox())!;
  expect(after.x + after.width / 2).toBeCloseTo(middle.x, 0);
  expect(after.y + after.height / 2).toBeCloseTo(middle.y, 0);
  await page.mouse.move(700, 120);
  await page.mouse.down();
  await page.mouse.move(650, 90, { steps: 3 });
  await page.mouse.up();
  const moved = (await y.boundingBox())!;
  expect(moved.x - after.x).toBeCloseTo(-50, 0);
  expect(moved.y - after.y).toBeCloseTo(-30, 0);
  await page.getByRole("button", { name: "Fit the whole graph (0)" }).click();
  expect(await scale(page)).toBeLessThanOrEqual(1);
});

test("constants are shown on request", async ({ page }) => {
  await open(page, "layered");
  await expect(box(page, "head/kernel")).toHaveCount(0);
  await page.getByRole("checkbox", { name: "constants" }).check();
  await page.getByRole("searchbox").fill("head/kernel");
  await expect(box(page, "head/kernel")).toBeInViewport();
});

test("names of the graph cannot inject markup", async ({ page }) => {
  let alerted = false;
  page.on("dialog", () => (alerted = true));
  await open(page, "hostile");
  const names = await page.locator(".gv *").evaluateAll((all) => [...new Set(all.map((each) => each.localName))]);
  expect(names).not.toContain("img");
  expect(names).not.toContain("script");
  await page.locator("g.leaf.rule").first().click();
  await expect(details(page)).toContainText("</script><script>alert(1)</script>");
  expect(alerted).toBe(false);
});

for (const scheme of ["light", "dark"] as const) {
  test(`fits a phone in ${scheme} mode`, async ({ page }) => {
    await page.emulateMedia({ colorScheme: scheme });
    await page.setViewportSize({ width: 390, height: 844 });
    await open(page, "layered");
    expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
    expect(await accessibilityProblems(page)).toEqual([]);
    const tops = await page
      .locator(".gv-bar > :is(input, button)")
      .evaluateAll((all) => all.map((each) => Math.round(each.getBoundingClientRect().top)));
    // Search in one row, all else in another.
    expect(new Set(tops).size).toBe(2);
    const dark = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    expect(dark).toBe(scheme === "dark" ? "rgb(16, 20, 24)" : "rgb(247, 248, 250)");
    await page.locator("[data-box].leaf").first().click();
    await expect(details(page)).toBeInViewport();
  });
}
