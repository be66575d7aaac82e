import { expect, test } from "./fixtures";

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
