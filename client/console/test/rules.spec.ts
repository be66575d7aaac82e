import { expect, settled, test } from "./fixtures";

/** The slope of `atan`, from its paper (arXiv:2007.05785). */
const atan = (x: number, alpha: number) => alpha / 2 / (1 + ((Math.PI * alpha * x) / 2) ** 2);

test("the gallery has every built-in rule with its curve", async ({ page, open, baseURL, token }) => {
  const answer = await page.request.get(`${baseURL}/v1/rules?kind=RULE_KIND_BUILTIN&pageSize=1000`, {
    headers: { Authorization: `Bearer ${token}` },
  });
  const names = ((await answer.json()) as { rules: { name: string }[] }).rules.map(({ name }) =>
    name.replace("rules/", ""),
  );
  await open("#/rules");
  const cards = page.getByRole("article");
  // Other tests may have rules of their own meanwhile.
  const builtin = cards.filter({ hasNotText: "own" });
  await expect(builtin).toHaveCount(names.length);
  expect((await builtin.getByRole("heading").allTextContents()).sort()).toEqual(names.sort());
  await expect(cards.filter({ hasText: "own" }).getByRole("heading", { name: "window" })).toHaveCount(1);
  await expect(page.getByRole("img", { name: /^Gradient of approx_sign over x, from 0 to 2/ })).toBeVisible();
  // A curve is sampled only when somebody scrolls to it.
  await expect(page.getByRole("img", { name: /^Gradient of safe_sqrt/ })).toHaveCount(0);
  await cards.filter({ hasText: "safe_sqrt" }).scrollIntoViewIfNeeded();
  await expect(page.getByRole("img", { name: /^Gradient of safe_sqrt/ })).toBeVisible();
});

test("search, kind and family filter the gallery, and the address keeps them", async ({ page, open }) => {
  await open("#/rules");
  await settled(page);
  await page.keyboard.press("/");
  await expect(page.getByRole("searchbox")).toBeFocused();
  await page.keyboard.type("2007.05785 atan");
  await expect(page.getByRole("article")).toHaveCount(1);
  // At once: the address has every key.
  await page.reload();
  await expect(page.getByRole("article")).toHaveCount(1);
  await page.getByRole("searchbox").fill("");
  await page.getByLabel("Family").selectOption("stable");
  await expect(page.getByRole("article").filter({ hasText: "log1pexp" })).toBeVisible();
  await expect(page.getByRole("article").filter({ hasText: /^atan/ })).toHaveCount(0);
  await page.getByLabel("Family").selectOption("");
  await page.getByLabel("Kind").selectOption("op");
  await page.getByRole("searchbox").fill("softsign");
  await expect(page.getByRole("article").filter({ hasText: /^Softsign/ })).toBeVisible();
  await page.getByRole("searchbox").fill("no such rule");
  await expect(page.getByText("No rule matches")).toBeVisible();
});

test("name, expression and overrides can be copied with the keyboard", async ({ page, open, context }) => {
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  await open("#/rules?search=sign_clip");
  const wanted = {
    Name: "sign_clip_gradient",
    Expression: "clip(dy, -c, c)",
    "Python override": 'overrides={"Sign": "sign_clip_gradient"}',
    "JSON override": '{\n  "selector": {\n    "opType": "Sign"\n  },\n  "rule": "sign_clip_gradient"\n}',
  };
  for (const [label, text] of Object.entries(wanted)) {
    await page.getByLabel("Copy sign_clip_gradient").focus();
    await page.keyboard.press("Enter");
    await page.getByRole("button", { name: label }).focus();
    await page.keyboard.press("Enter");
    await expect(page.getByLabel("Copy sign_clip_gradient")).toHaveText("Copied");
    await expect.poll(() => page.evaluate(() => navigator.clipboard.readText())).toBe(text);
  }
});

test("a rule's page shows formula, source and params, and its curve follows a param", async ({ page, open }) => {
  await open("#/rules/atan");
  await expect(page.getByLabel("formula", { exact: true })).toHaveText(
    "dy * (alpha / 2 / (1 + square(pi * alpha * x / 2)))",
  );
  await expect(page.getByRole("link", { name: "arXiv:2007.05785" })).toHaveAttribute(
    "href",
    "https://arxiv.org/abs/2007.05785",
  );
  const slider = page.getByRole("slider", { name: "Position on x" });
  const row = page.getByRole("row", { name: /^1 / });
  for (const alpha of [2, 4]) {
    await page.getByLabel("alpha").fill(String(alpha));
    await expect(row).toContainText(String(Number(atan(1, alpha).toPrecision(5))));
    await slider.fill("140"); // x = -3 + 140 / 40
    await expect(slider).toHaveAttribute(
      "aria-valuetext",
      new RegExp(`^x = 0.5: .*rule, dy = 1 ${Number(atan(0.5, alpha).toPrecision(4))}(,|$)`),
    );
  }
  await page.getByLabel("alpha").fill("-1");
  await expect(page.getByRole("alert")).toContainText("INVALID_PARAM");
});

test("a rule that reads several elements has a curve too", async ({ page, open }) => {
  await open("#/rules/gradient_clip_norm");
  await expect(page.getByText("Each point is in a tensor [x, 0] of its own")).toBeVisible();
  await expect(page.getByRole("region", { name: "Gradient check" })).toContainText("uses several elements at once");
});

test("a rule for layers says why it has no curve", async ({ page, open }) => {
  await open("#/rules/lrp_epsilon");
  await expect(page.getByText("it is for layers with weights")).toBeVisible();
});

test("an unknown rule is an error with the server's words", async ({ page, open }) => {
  await open("#/rules/atann");
  await expect(page.getByRole("alert")).toContainText("UNKNOWN_RULE");
});

test("of thousands of rules, a section shows some and more on demand", async ({ page, open }) => {
  const rules = Array.from({ length: 5000 }, (_, index) => ({
    name: `rules/own_${index}`,
    kind: "RULE_KIND_USER",
    opTypes: ["Conv2D"],
    digest: String(index),
  }));
  await page.route("**/v1/rules?kind=RULE_KIND_USER*", (route) => route.fulfill({ json: { rules } }));
  await open("#/rules?kind=user");
  const cards = page.getByRole("article");
  await expect(page.getByRole("status").filter({ hasText: "5,000 of 5,000 rules" })).toBeVisible();
  await expect(cards).toHaveCount(100);
  await page.getByRole("button", { name: "Show more" }).click();
  await expect(cards).toHaveCount(200);
  await page.getByRole("searchbox").fill("own_49");
  await expect(page.getByRole("status").filter({ hasText: "111 of 5,000 rules" })).toBeVisible();
  await expect(cards).toHaveCount(100);
});

test("a curve that the server had no time for is tried again", async ({ page, open }) => {
  const problem = { title: "Too many requests", status: 503, detail: "the server is busy", reason: "OVERLOADED" };
  await page.route("**/v1/rules:sample", (route) => route.fulfill({ status: 503, json: problem }));
  await open("#/rules?search=atan+2007");
  await expect(page.getByText("No curve: the server is busy")).toBeVisible();
  await page.unroute("**/v1/rules:sample");
  await page.getByRole("link", { name: "Programs" }).click();
  await expect(page.getByRole("heading", { name: "Programs", level: 1 })).toBeVisible();
  await page.goBack();
  await expect(page.getByRole("img", { name: /^Gradient of atan/ })).toBeVisible();
});

test.describe("text of other people", () => {
  const RIGHT_TO_LEFT = "\u202e";

  test.beforeEach(async ({ page }) => {
    const rule = {
      name: "rules/odd",
      kind: "RULE_KIND_USER",
      description: `${"W".repeat(4000)} ${RIGHT_TO_LEFT}see https://example.org/${"paper".repeat(20)}`,
      reference: `https://example.org/${"paper".repeat(20)}`,
      opTypes: ["Conv2D"],
      definition: {
        expression: "dy * constructor",
        params: [{ name: "constructor", defaultValue: 1, description: `${RIGHT_TO_LEFT}half width` }],
      },
    };
    await page.route("**/v1/rules/odd", (route) => route.fulfill({ json: { rule } }));
  });

  test("does not widen the page", async ({ page, open }) => {
    await page.setViewportSize({ width: 320, height: 700 });
    await open("#/rules/odd");
    await expect(page.getByRole("heading", { name: "Params" })).toBeVisible();
    expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(320);
  });

  test("does not turn the page's own words around", async ({ page, open }) => {
    await open("#/rules/odd");
    const lefts = await page.getByText("Default 1").evaluate((element) => {
      const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      while (!texts.nextNode()!.textContent!.includes("Default"));
      const start = texts.currentNode.textContent!.indexOf("Default");
      return [0, 1, 2].map((offset) => {
        const range = document.createRange();
        range.setStart(texts.currentNode, start + offset);
        range.setEnd(texts.currentNode, start + offset + 1);
        return range.getBoundingClientRect().left;
      });
    });
    expect(lefts).toEqual([...lefts].sort((a, b) => a - b));
  });
});

test("a rule that hides a built-in one links to it", async ({ page, open }) => {
  // Only an upgrade of the server brings such a rule: a new built-in rule has the name of a stored one.
  await page.route("**/v1/rules/window", async (route) => {
    const answer = (await (await route.fetch()).json()) as { rule: Record<string, unknown> };
    answer.rule["hidesBuiltin"] = true;
    await route.fulfill({ json: answer });
  });
  await open("#/rules/window");
  await expect(page.getByRole("link", { name: "builtin/window" })).toHaveAttribute("href", "#/rules/builtin%2Fwindow");
});

test("a built-in rule has a page under its full name, too", async ({ page, open }) => {
  await open("#/rules/builtin%2Fatan");
  await expect(page.getByRole("heading", { name: "atan", exact: true })).toBeVisible();
  const row = page.getByRole("row", { name: /^1 / });
  await expect(row).toContainText(String(Number(atan(1, 2).toPrecision(5))));
});

test.describe("of another tenant", () => {
  test.use({ token: async ({}, use) => use(process.env["CONSOLE_PLAIN_TOKEN"]!) });

  test("a rule with several inputs has a curve, with a field for each", async ({ page, open, baseURL, token }) => {
    const headers = { Authorization: `Bearer ${token}` };
    const rule = { name: "rules/two_inputs", definition: { expression: "dy * x1 * 2, dy * x" } };
    const answer = await page.request.post(`${baseURL}/v1/rules`, { headers, data: { rule } });
    expect(answer.status()).toBe(200);
    await open("#/rules/two_inputs");
    const row = page.getByRole("row", { name: /^0 / });
    await expect(row).toHaveText("02");
    await page.getByRole("region", { name: "Further inputs" }).getByLabel("x1").fill("-4");
    await expect(row).toHaveText("0−8");
    const slider = page.getByRole("slider", { name: "Position on x" });
    await slider.fill("140");
    await expect(slider).toHaveAttribute("aria-valuetext", /^x = 0.5: .*rule, dy = 1 −8(,|$)/);
    expect((await page.request.delete(`${baseURL}/v1/rules/two_inputs`, { headers })).status()).toBe(200);
  });
});
