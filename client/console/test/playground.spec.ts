import { expect, settled, test } from "./fixtures";

const at = (expression: string, op: string) => `#/playground?${new URLSearchParams({ e: expression, op })}`;

test("an error marks its column and offers the missing param", async ({ page, open }) => {
  await open(at("dy * alpha + x", "Sign"));
  await expect(page.locator("mark")).toHaveText("a");
  await expect(page.getByText("Column 6:")).toBeVisible();
  await expect(page.getByLabel("Expression")).toHaveAttribute("aria-invalid", "true");
  // The mark is exactly behind its character.
  const [mark, field] = [await page.locator("mark").boundingBox(), await page.getByLabel("Expression").boundingBox()];
  const [left, width] = await page.getByLabel("Expression").evaluate((element) => {
    const canvas = document.createElement("canvas").getContext("2d")!;
    const style = getComputedStyle(element);
    canvas.font = `${style.fontSize} ${style.fontFamily}`;
    return [
      parseFloat(style.paddingLeft) + parseFloat(style.borderLeftWidth) + canvas.measureText("dy * ").width,
      canvas.measureText("a").width,
    ];
  });
  expect(mark!.x).toBeCloseTo(field!.x + left!, 0);
  expect(mark!.width).toBeCloseTo(width!, 0);
  const code = page.getByRole("button", { name: "Copy Python override" });
  await expect(code).toHaveCount(0);
  await page.getByRole("button", { name: "Add param alpha" }).click();
  await expect(code).toBeVisible();
  await page.getByLabel("Value of alpha").fill("3");
  // dy * 3 + x at 1
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/4$/);
  await expect(page).toHaveURL(/p\.alpha=3/);
  await page.reload();
  await expect(page.getByLabel("Value of alpha")).toHaveValue("3");
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/4$/);
});

test("values at kinks and special numbers are the server's", async ({ page, open }) => {
  await open(at("dy / x", "Relu"));
  const rows = page.getByRole("region", { name: "Values at kinks and special numbers" }).getByRole("row");
  await expect(rows).toHaveText([
    /^xRelu\(x\)Own gradientRule$/,
    /^−100−1$/,
    /^000inf$/,
    /^1111$/,
    /^infinf10$/,
    /^−inf000|^−inf00−0$/,
    /^nannan0nan$/,
  ]);
});

test("the check tells a true gradient from one that is 0.1 % too large", async ({ page, open }) => {
  const check = page.getByRole("region", { name: "Gradient check" });
  await open(at("dy * sigmoid(x)", "Softplus"));
  await expect(check).toContainText("equals central differences of Softplus(x) at 1,000 points from −4 to 4");
  await page.getByLabel("Expression").fill("dy * sigmoid(x) * 1.001");
  await expect(check).toContainText("differs from central differences");
  // All numbers are 0.1 % too large, also the one that is shown.
  const [, rule, expected] = (await check.textContent())!
    .replaceAll("−", "-")
    .match(/Rule([-.\d]+)dy × difference([-.\d]+?)Upstream/)!;
  expect(Number(rule) / Number(expected)).toBeCloseTo(1.001, 3);
});

test("the check finds rules that are right for some sizes of dy, or at some x, only", async ({ page, open }) => {
  const check = page.getByRole("region", { name: "Gradient check" });
  const wrong: [string, string][] = [
    ["where(dy > 0, default, 0)", "Softplus"],
    ["where(abs(dy) > 1.6, 0, default)", "Tanh"],
    ["where(abs(dy) < 0.01, 0, default)", "Tanh"],
    ["clip(dy, -2, 2) * 2 * x", "Square"],
    ["where(abs(x - 0.0123) < 0.01, 0, default)", "Tanh"],
  ];
  for (const [expression, op] of wrong) {
    await open(at(expression, op));
    await expect(check, expression).toContainText(`differs from central differences of ${op}(x)`);
  }
});

test("the check leaves kinks and jumps out and names them", async ({ page, open }) => {
  const check = page.getByRole("region", { name: "Gradient check" });
  await open(at("dy * (x > 0)", "Relu"));
  await expect(check).toContainText("equals central differences of Relu(x) at 1,000 points");
  await expect(check).toContainText("Not compared: a kink or jump of Relu(x), where the rule gives 0 at 0");
  await page.getByRole("combobox", { name: "Op" }).selectOption("Sign");
  await page.getByLabel("Expression").fill("dy * 0");
  await expect(check).toContainText("equals central differences of Sign(x) at 1,000 points");
});

test("the table has the kinks of the op and of the rule", async ({ page, open }) => {
  const rows = page.getByRole("region", { name: "Values at kinks and special numbers" }).getByRole("row");
  await open(at("dy * (x > 0.7) * (x < 6)", "Relu6"));
  await expect(rows.getByRole("rowheader")).toHaveText(["−1", "0", "0.7", "1", "6", "inf", "−inf", "nan"]);
  await expect(rows.filter({ hasText: /^6/ })).toHaveText("6600");
  await expect(page.getByLabel("Curve of the rule")).toContainText("gradient of Relu6");
});

test("the identity has a check too", async ({ page, open }) => {
  const check = page.getByRole("region", { name: "Gradient check" });
  await open(at("dy", "Identity"));
  await expect(check).toContainText("equals central differences of Identity(x)");
  await open("#/rules/gradient_reversal");
  await expect(check).toContainText("differs from central differences of Identity(x) at 1,000 of 1,000 points");
});

test("the playground follows its address", async ({ page, open }) => {
  await open(at("dy", "Relu"));
  await expect(page.getByLabel("Expression")).toHaveValue("dy");
  await page.evaluate((hash) => (location.hash = hash), at("dy * 2", "Tanh"));
  await expect(page.getByLabel("Expression")).toHaveValue("dy * 2");
  await expect(page.getByRole("combobox", { name: "Op" })).toHaveValue("Tanh");
  await page.getByLabel("Expression").fill("dy * 3");
  await expect(page).toHaveURL(/dy\+\*\+3/);
  await page.goBack();
  await expect(page.getByLabel("Expression")).toHaveValue("dy");
});

test("the address changes less often than browsers allow", async ({ page, open }) => {
  await page.addInitScript(() => {
    const counted = window as unknown as { changes: number };
    counted.changes = 0;
    const replace = history.replaceState.bind(history);
    history.replaceState = (...args) => {
      counted.changes += 1;
      // Safari's limit is 100 changes.
      if (counted.changes > 3) throw new DOMException("too many", "SecurityError");
      replace(...args);
    };
  });
  await open(at("dy", "Relu"));
  await settled(page);
  await page.getByLabel("Expression").evaluate((element) => {
    const field = element as HTMLTextAreaElement;
    for (let count = 1; count <= 200; count++) {
      field.value = `dy * ${count}`;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }
  });
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/200$/);
  expect(await page.evaluate(() => (window as unknown as { changes: number }).changes)).toBeLessThan(50);
  // Beyond the limit, the page still follows what somebody types.
  for (const text of ["dy * 7", "dy * 8", "dy * 9"]) {
    await page.getByLabel("Expression").fill(text);
    await page.getByRole("heading", { name: "Curve" }).click();
  }
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/9$/);
});

test("a range that is none is an error, and the address keeps one that is", async ({ page, open }) => {
  await open(at("dy", "Relu"));
  await page.getByLabel("x from").fill("5");
  await expect(page.getByText("The range must go from a number to a larger one.")).toBeVisible();
  await expect(page.getByLabel("x from")).toHaveAttribute("aria-invalid", "true");
  await page.getByLabel("x from").fill("inf");
  await expect(page.getByText("The range must go from a number to a larger one.")).toBeVisible();
  await page.getByLabel("x from").fill("1");
  await expect(page.getByLabel("x from")).toHaveAttribute("aria-invalid", "false");
  await expect(page).toHaveURL(/from=1&to=3/);
  await page.reload();
  await expect(page.getByLabel("x from")).toHaveValue("1");
  await expect(page.getByRole("region", { name: "Gradient check" })).toContainText("from 1 to 3");
});

test("an op that is no function of one number, or no op, is an error next to its field", async ({ page, open }) => {
  await open(at("default", "@linear"));
  await expect(page.getByText("Choose another op: no op of @linear maps one number to one number.")).toBeVisible();
  await page.getByRole("combobox", { name: "Op" }).selectOption("Relu");
  await expect(page.getByRole("region", { name: "Gradient check" })).toContainText("equals central differences");
  await open(at("default", "constructor"));
  await expect(page.getByRole("alert")).toContainText("constructor");
});

test("of calls that overlap, the last one counts", async ({ page, open }) => {
  let held: (() => void) | undefined;
  let cancelled = false;
  await page.route("**/v1/rules:sample", async (route) => {
    if (route.request().postData()!.includes("dy * 111")) {
      await new Promise<void>((resolve) => (held = resolve));
      await route.continue().catch(() => (cancelled = true));
    } else await route.continue();
  });
  page.on("requestfailed", () => (cancelled = true));
  await open(at("dy * 111", "Sign"));
  await expect.poll(() => held !== undefined).toBe(true);
  await page.getByLabel("Expression").fill("dy * 222");
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/222$/);
  held!();
  await expect.poll(() => cancelled).toBe(true);
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText(/222$/);
});

test("a rule is created, shown, and deleted after a question", async ({ page, open }) => {
  await open(at("dy * exp(-abs(x))", "Sign"));
  await expect(page.getByRole("button", { name: "Create rule" })).toBeEnabled();
  await page.getByRole("button", { name: "Create rule" }).click();
  await page.getByLabel("Name", { exact: true }).fill("9 wrong name");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  await expect(page.getByRole("dialog").getByRole("alert")).toBeVisible();
  await page.getByLabel("Name", { exact: true }).fill("laplace_test");
  await page.getByLabel("Description (optional)").fill("Slope of a Laplace distribution.");
  await page.keyboard.press("Enter");
  await expect(page).toHaveURL(/#\/rules\/laplace_test$/);
  await expect(page.getByText("Slope of a Laplace distribution.")).toBeVisible();
  await page.getByRole("link", { name: "Rules", exact: true }).first().click();
  await expect(page.getByRole("article").filter({ hasText: "laplace_test" })).toContainText("own");
  await page.getByRole("link", { name: "laplace_test" }).click();
  await page.getByRole("button", { name: "Delete" }).click();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByRole("button", { name: "Delete" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await expect(page).toHaveURL(/#\/rules$/);
  await settled(page);
  await expect(page.getByRole("article").filter({ hasText: "laplace_test" })).toHaveCount(0);
});

test("a built-in rule opens in the playground with its params", async ({ page, open }) => {
  await open("#/rules/atan");
  await page.getByRole("link", { name: "Open in playground" }).click();
  await expect(page.getByLabel("Expression")).toHaveValue("dy * (alpha / 2 / (1 + square(pi * alpha * x / 2)))");
  await expect(page.getByLabel("Value of alpha")).toHaveValue("2");
  await expect(page.getByRole("row", { name: /^0 / })).toHaveText(/1$/);
});

test("a function whose slope has a kink is its own true gradient", async ({ page, open }) => {
  await open(at("default", "Softsign"));
  await expect(page.getByRole("region", { name: "Gradient check" })).toContainText("equals central differences");
});

test("an expression with several inputs gets a field for each", async ({ page, open }) => {
  await open(at("first(dy * x1 + x * x2)", ""));
  const row = page.getByRole("row", { name: /^−1 / });
  // All further inputs are 1 at first: 1 - 1.
  await expect(row).toHaveText("−10");
  await page.getByLabel("x1", { exact: true }).fill("3");
  await page.getByLabel("x2", { exact: true }).fill("-5");
  await expect(row).toHaveText("−18");
  await page.reload();
  await expect(page.getByLabel("x2", { exact: true })).toHaveValue("-5");
  await expect(row).toHaveText("−18");
  // Inputs have equal shapes, so that a rule can give each its gradient.
  await page.getByLabel("Expression").fill("dy * (x1 + 1), dy * x");
  await expect(page.getByLabel("x2", { exact: true })).toHaveCount(0);
  await expect(row).toHaveText("−14");
});

test("an op that the playground does not list gets the inputs that somebody adds", async ({ page, open }) => {
  await open(at("first(default)", "SquaredDifference"));
  await expect(page.getByRole("alert")).toContainText("SquaredDifference");
  await page.getByRole("button", { name: "Add input x1" }).click();
  await page.getByLabel("x1", { exact: true }).fill("4");
  // The slope of (x - 4)² at 1, after the op's output and its own gradient.
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText("19−6−6");
  await expect(page.getByRole("columnheader", { name: "SquaredDifference(x, 4)" })).toBeVisible();
  await expect(page.getByRole("region", { name: "Gradient check" })).toContainText(
    "equals central differences of SquaredDifference(x, 4)",
  );
});

test("the further input of a listed op can be changed", async ({ page, open }) => {
  await open(at("first(default)", "Minimum"));
  await expect(page.getByRole("columnheader", { name: "Minimum(x, 1)" })).toBeVisible();
  await page.getByLabel("x1", { exact: true }).fill("-2");
  await expect(page.getByRole("columnheader", { name: "Minimum(x, −2)" })).toBeVisible();
  await expect(page.getByRole("row", { name: /^1 / })).toHaveText("1−200");
});
