import { expect, test } from "./fixtures";

const SQUARE = [
  'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }',
  'node { name: "y" op: "Square" input: "x" }',
].join("\n");
const INTEGERS = SQUARE.replace("DT_FLOAT", "DT_INT64");

for (const [name, text, shown] of [
  ["integers", INTEGERS, "15241383936"],
  ["floats", SQUARE, "1.52e+10"],
] as const) {
  test(`numbers of ${name} have the digits of their type`, async ({ page, open }) => {
    await open("#/graphs");
    await page.getByLabel("Text or JSON").fill(text);
    await page.getByRole("button", { name: "Load text" }).click();
    await page.getByLabel("Value", { exact: true }).selectOption("values");
    await page.getByLabel("Values of x").fill("123456");
    await page.getByRole("button", { name: "Run" }).click();
    const output = page.getByRole("region", { name: "Output y" });
    await output.getByText("Numbers").click();
    await expect(output.locator("pre")).toHaveText(shown);
  });
}

test("results of earlier settings are marked, and the graph is there again after another page", async ({
  page,
  open,
}) => {
  await open("#/graphs");
  await page.getByLabel("Text or JSON").fill(SQUARE);
  await page.getByRole("button", { name: "Load text" }).click();
  await page.getByRole("button", { name: "Run" }).click();
  const results = page.getByRole("region", { name: "Results" });
  const mark = results.getByText("Settings have changed");
  await expect(results).toBeVisible();
  await expect(mark).toHaveCount(0);
  await page.getByLabel("Compare with rule").fill("clip_gradient");
  await expect(mark).toBeVisible();
  await page.getByRole("button", { name: "Run" }).click();
  await expect(page.getByRole("alert")).toContainText("Add an override");
  await page.getByRole("button", { name: "Add override" }).click();
  await page.getByLabel("Matches").fill("Square");
  await page.getByRole("link", { name: "Rules", exact: true }).click();
  await expect(page.getByRole("heading", { name: "Rules", level: 1 })).toBeVisible();
  await page.goBack();
  await expect(page.getByRole("heading", { name: "pasted graph" })).toBeVisible();
  await expect(page.getByLabel("Matches")).toHaveValue("Square");
  await expect(page.getByLabel("Compare with rule")).toHaveValue("clip_gradient");
  await expect(mark).toBeVisible();
  await page.getByRole("button", { name: "Another graph" }).click();
  await expect(page.getByRole("region", { name: "Your graph" })).toBeVisible();
});

test("many programs are found by a search", async ({ page, open }) => {
  const programs = Array.from({ length: 120 }, (_, number) => ({ name: `programs/net-${number}` }));
  await page.route("**/v1/programs?*", (route) => route.fulfill({ json: { programs } }));
  await open("#/graphs");
  const region = page.getByRole("region", { name: "Stored programs" });
  await expect(region.getByRole("status")).toContainText("The first 50 of 120");
  await region.getByRole("searchbox").fill("NET-11");
  await expect(region.getByRole("button")).toHaveText([
    "net-11",
    ...Array.from({ length: 10 }, (_, at) => `net-11${at}`),
  ]);
  await region.getByRole("button", { name: "net-117" }).click();
  await expect(page).toHaveURL(/program=net-117/);
});
