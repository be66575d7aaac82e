import { accessibilityProblems, expect, PLACES, settled, test } from "./fixtures";

for (const place of PLACES) {
  test(`${place} is accessible in both themes and fits a phone`, async ({ page, open }) => {
    await page.emulateMedia({ colorScheme: "light", reducedMotion: "reduce" });
    await open(place);
    await settled(page);
    expect(await accessibilityProblems(page)).toEqual([]);
    await page.emulateMedia({ colorScheme: "dark", reducedMotion: "reduce" });
    expect(await accessibilityProblems(page, ["color-contrast"])).toEqual([]);
    await page.setViewportSize({ width: 390, height: 844 });
    expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
  });
}

test("the policy allows no inline code, and no other origin", async ({ page }) => {
  const answer = await page.request.get("/");
  const policy = answer.headers()["content-security-policy"]!;
  for (const part of [
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "frame-ancestors 'none'",
  ])
    expect(policy).toContain(part);
  expect(policy).not.toContain("unsafe");
  // The policy is in force: an inline script that somebody adds does not run.
  await page.goto("/");
  const ran = await page.evaluate(() => {
    const script = document.createElement("script");
    script.textContent = "window.inlineScriptRan = true";
    document.body.append(script);
    const had = "inlineScriptRan" in window;
    script.remove();
    return had;
  });
  expect(ran).toBe(false);
});

test("browsers ask whether a file changed, and do not load it again if it did not", async ({ page }) => {
  for (const path of ["/", "/assets/index.js"]) {
    const headers = (await page.request.get(path)).headers();
    expect(headers["cache-control"]).toBe("no-cache");
    const again = await page.request.get(path, { headers: { "If-None-Match": headers["etag"]! } });
    expect(again.status()).toBe(304);
    expect(again.headers()["cache-control"]).toBe("no-cache");
  }
});

test("signing out hides the answers to the token", async ({ page, open }) => {
  await open("#/server");
  await expect(page.getByRole("region", { name: "Table of tenants" })).toContainText("ada");
  await page.getByRole("button", { name: "Sign out" }).click();
  await expect(page.getByRole("alert")).toContainText("This server asks for a token");
  await expect(page.getByRole("main")).not.toContainText("ada");
  await expect(page.getByRole("region", { name: "Table of engines" })).toHaveCount(0);
});

test("an exception of a page leaves the navigation, and the next page works", async ({ page, open }) => {
  await page.route("**/v1/rules/atan", (route) => route.fulfill({ json: {} }));
  await open("#/rules/atan");
  await expect(page.getByRole("alert")).toContainText("Error in the console");
  await page.getByRole("link", { name: "Programs" }).click();
  await expect(page.getByRole("link", { name: "binary-net" })).toBeVisible();
});

test("a page whose style did not arrive is loaded again", async ({ page, open }) => {
  await page.route("**/assets/page.css", (route) => route.abort());
  await open("#/rules");
  await settled(page);
  await page.getByRole("link", { name: "Graphs" }).click();
  await expect(page.getByRole("alert")).toContainText("The page did not arrive");
  await page.unroute("**/assets/page.css");
  await page.getByRole("button", { name: "Try again" }).click();
  await expect(page.locator(".graph-examples")).toHaveCSS("display", "grid");
});

test("the header does not hide what gets the focus", async ({ page, open }) => {
  // A zoom of 200 % on a small laptop.
  await page.setViewportSize({ width: 640, height: 450 });
  await open("#/rules/atan");
  await settled(page);
  const breadcrumb = page.getByRole("navigation", { name: "Breadcrumb" }).getByRole("link");
  // The link is at the top of the window, behind the header.
  const top = (await breadcrumb.boundingBox())!.y;
  await page.locator("main summary").first().focus();
  await page.evaluate((scrolled) => window.scrollTo(0, scrolled), top - 10);
  await page.keyboard.press("Shift+Tab");
  await expect(breadcrumb).toBeFocused();
  const [header, link] = [await page.getByRole("banner").boundingBox(), await breadcrumb.boundingBox()];
  expect(link!.y).toBeGreaterThanOrEqual(header!.y + header!.height);
});

test.describe("without a token", () => {
  test.use({ token: "" });

  test("somebody signs in with the keyboard, and the tab keeps the token over a reload", async ({ page, open }) => {
    await open("#/programs");
    await expect(page.getByRole("alert")).toContainText("This server asks for a token");
    await page.getByRole("alert").getByRole("button", { name: "Sign in" }).focus();
    await page.keyboard.press("Enter");
    await page.keyboard.type("two words");
    await page.keyboard.press("Enter");
    await expect(page.getByRole("dialog")).toContainText("A token has no spaces");
    await page.getByLabel("Token").fill(process.env["CONSOLE_ADMIN_TOKEN"]!);
    await page.keyboard.press("Enter");
    await expect(page.getByRole("link", { name: "binary-net" })).toBeVisible();
    await page.reload();
    await expect(page.getByRole("link", { name: "binary-net" })).toBeVisible();
    expect(await page.evaluate(() => JSON.stringify(localStorage))).not.toContain(process.env["CONSOLE_ADMIN_TOKEN"]!);
    await page.getByRole("button", { name: "Sign out" }).click();
    await expect(page.getByRole("alert")).toContainText("This server asks for a token");
    await expect(page.getByRole("link", { name: "binary-net" })).toHaveCount(0);
  });

  test("a wrong token is refused in the dialog, and not kept", async ({ page, open }) => {
    await open("#/rules");
    await settled(page);
    await page.getByRole("banner").getByRole("button", { name: "Sign in" }).click();
    await page.getByLabel("Token").fill("wrong");
    await page.keyboard.press("Enter");
    await expect(page.getByRole("dialog")).toContainText("The server does not accept this token");
    await page.getByRole("button", { name: "Cancel" }).click();
    await expect(page.getByRole("banner").getByRole("button", { name: "Sign in" })).toBeVisible();
    expect(await page.evaluate(() => JSON.stringify(sessionStorage))).not.toContain("wrong");
  });
});

test.describe("with a token that is no longer valid", () => {
  test.use({ token: "expired" });

  test("the error says so", async ({ page, open }) => {
    await open("#/programs");
    await expect(page.getByRole("alert")).toContainText("The server does not accept this token");
  });
});

test("the theme follows the system until somebody chooses one", async ({ page, open }) => {
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  await page.emulateMedia({ colorScheme: "dark" });
  await open("#/rules");
  const dark = await background();
  await page.getByLabel("Theme").selectOption("light");
  expect(await background()).not.toBe(dark);
  const light = await background();
  await page.reload();
  expect(await background()).toBe(light);
  await page.getByLabel("Theme").selectOption("system");
  expect(await background()).toBe(dark);
});

test("a new page starts at its top, and the skip button leads past the navigation", async ({ page, open }) => {
  await open("#/rules");
  await settled(page);
  await page.keyboard.press("Tab");
  await expect(page.getByRole("button", { name: "Skip to content" })).toBeFocused();
  await page.keyboard.press("Enter");
  await expect(page.getByRole("main")).toBeFocused();
  await page.getByRole("link", { name: "Programs" }).click();
  await expect(page.getByRole("main")).toBeFocused();
  await expect(page).toHaveTitle("Programs · gradrule");
});

test("a page says that the gateway does not answer, and tries again", async ({ page, open }) => {
  await page.route("**/v1/programs*", (route) => route.abort());
  await open("#/programs");
  await expect(page.getByRole("alert")).toContainText("The gateway does not answer");
  await page.unroute("**/v1/programs*");
  await page.getByRole("button", { name: "Try again" }).click();
  await expect(page.getByRole("link", { name: "binary-net" })).toBeVisible();
});

for (const place of ["#/rules", "#/rules/atan", "#/playground", "#/server"]) {
  test(`${place} does not move while its answers arrive`, async ({ page, open }) => {
    await page.addInitScript(() => {
      const shifts = ((window as unknown as { shifts: number[] }).shifts = []) as number[];
      const add = (entry: PerformanceEntry) => shifts.push((entry as PerformanceEntry & { value: number }).value);
      new PerformanceObserver((list) => list.getEntries().forEach(add)).observe({
        type: "layout-shift",
        buffered: true,
      });
    });
    await open(place);
    await settled(page);
    const shifts = await page.evaluate(() => (window as unknown as { shifts: number[] }).shifts);
    // Chromium's measure of layout shift; pages below 0.1 count as good.
    expect(shifts.reduce((sum, shift) => sum + shift, 0)).toBeLessThan(0.05);
  });
}
