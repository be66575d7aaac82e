import { expect, test } from "./fixtures";

test("a program's page shows its tensors, overrides and digests", async ({ page, open, baseURL, token }) => {
  const answer = await page.request.get(`${baseURL}/v1/programs/binary-net`, {
    headers: { Authorization: `Bearer ${token}` },
  });
  const { program } = (await answer.json()) as { program: { digests: { graph: string; program: string } } };
  await open("#/programs");
  await page.getByRole("link", { name: "binary-net" }).click();
  await expect(page.getByRole("region", { name: "Inputs" }).getByRole("row").nth(1)).toHaveText(/x\s*float32\[\?, 3\]/);
  await expect(page.getByRole("region", { name: "Table of overrides" }).getByRole("row").nth(1)).toHaveText(
    /layer\/signSignsteactive/,
  );
  await expect(page.getByText(program.digests.graph)).toBeVisible();
  await expect(page.getByText(program.digests.program)).toBeVisible();
  await page.getByRole("link", { name: "ste" }).click();
  await expect(page).toHaveURL(/#\/rules\/ste$/);
});

test("a program is deleted after a question", async ({ page, open }) => {
  await open("#/programs/spare-net");
  await page.getByRole("button", { name: "Delete" }).click();
  await page.keyboard.press("Escape");
  await expect(page.getByRole("dialog")).toBeHidden();
  await page.getByRole("button", { name: "Delete" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await expect(page.getByRole("link", { name: "binary-net" })).toBeVisible();
  await expect(page.getByRole("link", { name: "spare-net" })).toHaveCount(0);
  await open("#/programs/spare-net");
  await expect(page.getByRole("alert")).toContainText("PROGRAM_NOT_FOUND");
});

test("a program's page leads to its run", async ({ page, open }) => {
  await open("#/programs/binary-net");
  await page.getByRole("link", { name: "Run" }).click();
  await expect(page).toHaveURL(/#\/graphs\?program=/);
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("binary-net");
  await expect(page.getByRole("button", { name: "Run", exact: true })).toBeVisible();
});

test("search finds programs of all pages, and each page is read once", async ({ page, open }) => {
  const all = Array.from({ length: 250 }, (_, index) => ({
    name: `programs/net-${index}`,
    ys: [{ name: `y${index}` }],
  }));
  const asked: string[] = [];
  await page.route("**/v1/programs?*", async (route) => {
    const query = new URL(route.request().url()).searchParams;
    const from = Number(query.get("pageToken") ?? 0);
    asked.push(`${from}`);
    const to = from + Number(query.get("pageSize"));
    await route.fulfill({
      json: { programs: all.slice(from, to), ...(to < 250 ? { nextPageToken: String(to) } : {}) },
    });
  });
  await open("#/programs");
  const rows = page.getByRole("rowheader");
  await expect(rows).toHaveCount(100);
  await page.getByRole("button", { name: "Show more" }).click();
  await expect(rows).toHaveCount(200);
  expect(asked).toEqual(["0", "100"]);
  await page.getByRole("searchbox").fill("y249");
  await expect(rows).toHaveText(["net-249"]);
  await expect(page.getByRole("status").filter({ hasText: "1 of 250 programs" })).toBeVisible();
  expect(asked).toEqual(["0", "100", "200"]);
  await page.reload();
  await expect(rows).toHaveText(["net-249"]);
});

test.describe("of a tenant without programs", () => {
  test.use({ token: async ({}, use) => use(process.env["CONSOLE_PLAIN_TOKEN"]!) });

  test("the list is empty and says how to get one", async ({ page, open }) => {
    await open("#/programs");
    await expect(page.getByText("No stored programs")).toBeVisible();
  });
});
