import { accessibilityProblems, expect, test } from "./fixtures";

test("an example shows rules at their nodes, results and differences at a click", async ({ page, open }) => {
  await open("#/graphs");
  await page.getByRole("button", { name: /^Binary network/ }).click();
  const gradients = page.getByRole("region", { name: "Gradient of x" });
  await expect(gradients).toBeVisible();
  for (const column of ["ste_sign", "atan", "no overrides"]) await expect(gradients.getByText(column)).toBeVisible();
  // TensorFlow's own gradient of Sign is zero; a rule lets gradients pass.
  await expect(gradients.getByText("100 %")).toHaveCount(1);
  await page.getByRole("searchbox").fill("dense_1/Sign");
  await expect(page.getByRole("complementary", { name: "Details" })).toContainText("ste_sign");
});

test("an example is accessible in both themes and fits a phone", async ({ page, open }) => {
  await page.emulateMedia({ colorScheme: "light", reducedMotion: "reduce" });
  await open("#/graphs");
  await page.getByRole("button", { name: /^Image network/ }).click();
  const gradients = page.getByRole("region", { name: "Gradient of image" });
  await expect(gradients.locator("canvas")).toHaveCount(2);
  // Images of two columns are side by side.
  const tops = await gradients
    .locator("canvas")
    .evaluateAll((all) => all.map((each) => each.getBoundingClientRect().top));
  expect(tops[0]).toBe(tops[1]);
  await page.locator("[data-box].leaf").first().click();
  expect(await accessibilityProblems(page)).toEqual([]);
  await page.emulateMedia({ colorScheme: "dark", reducedMotion: "reduce" });
  expect(await accessibilityProblems(page, ["color-contrast"])).toEqual([]);
  await page.setViewportSize({ width: 390, height: 844 });
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
});

test("a finding names the rule that is meant, and disappears when it is corrected", async ({ page, open }) => {
  await open("#/graphs");
  await page.getByRole("button", { name: /^Binary network/ }).click();
  const rule = page.getByLabel("Rule", { exact: true });
  await rule.fill("ste_sgn");
  await expect(page.getByRole("alert")).toContainText("ste_sign");
  await rule.fill("ste_sign");
  await expect(page.getByRole("alert")).toHaveCount(0);
});

test("a pasted graph is drawn and run with typed values", async ({ page, open }) => {
  await open("#/graphs");
  const text = 'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }\n';
  await page.getByLabel("Text or JSON").fill(`${text}node { name: "y" op: "Square" input: "x" }`);
  await page.getByRole("button", { name: "Load text" }).click();
  await page.getByLabel("Value", { exact: true }).selectOption("values");
  await page.getByLabel("Values of x").fill("[3, -2]");
  await page.getByRole("button", { name: "Run" }).click();
  const gradients = page.getByRole("region", { name: "Gradient of x" });
  await gradients.getByText("Numbers").click();
  // The gradient of x² is 2x.
  await expect(gradients.locator("pre")).toHaveText(/^\s*6\s+−4\s*$/);
});
