import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { expect, test as base, type Page } from "@playwright/test";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

interface Fixtures {
  /** Token that the page is signed in with; empty: nobody. */
  token: string;
  /** Opens a place of the console and fails the test if the page breaks its policy or has an error. */
  open: (hash: string) => Promise<void>;
}

export const test = base.extend<Fixtures>({
  // The variables are set by servers.ts, before any test runs.
  baseURL: async ({}, use) => use(process.env["CONSOLE_URL"]!),
  token: async ({}, use) => use(process.env["CONSOLE_ADMIN_TOKEN"]!),
  open: async ({ page, token, baseURL }, use) => {
    const broken: string[] = [];
    page.on("pageerror", (error) => broken.push(error.message));
    page.on("console", (message) => {
      if (message.type() === "error" && !message.text().startsWith("Failed to load resource"))
        broken.push(message.text());
    });
    page.on("request", (request) => {
      if (!request.url().startsWith(baseURL!)) broken.push(`calls ${request.url()}`);
    });
    if (token)
      await page.addInitScript(
        (text) =>
          sessionStorage.getItem("signed") ??
          (sessionStorage.setItem("signed", "1"), sessionStorage.setItem("gradrule-token", text)),
        token,
      );
    await use(async (hash) => void (await page.goto("/" + hash)));
    expect(broken).toEqual([]);
  },
});

/** Pages to look at in every theme and width. */
export const PLACES = [
  "#/rules",
  "#/rules/atan",
  "#/rules/window",
  "#/playground",
  "#/playground?e=dy+*+alpha&op=Sign",
  "#/graphs",
  "#/graphs?program=binary-net",
  "#/programs",
  "#/programs/binary-net",
  "#/server",
  "#/nowhere",
];

/** Waits until the page has no skeleton and no call is under way. */
export async function settled(page: Page): Promise<void> {
  await expect(page.locator("main h1")).toBeVisible();
  await expect(page.locator(".loading, [aria-busy=true]")).toHaveCount(0);
}

/** Returns the accessibility rules that the page breaks, with the elements. `rules`: only these; else all. */
export async function accessibilityProblems(page: Page, rules?: string[]): Promise<string[]> {
  await page.evaluate(AXE);
  return page.evaluate(async (chosen) => {
    interface Axe {
      run: (options: unknown) => Promise<{ violations: { id: string; nodes: { html: string }[] }[] }>;
    }
    const { axe } = window as unknown as { axe: Axe };
    const { violations } = await axe.run({ ...(chosen ? { runOnly: chosen } : {}), resultTypes: ["violations"] });
    // Boxes of a graph show short names and marks; what reads them aloud gets their full names.
    const isMeant = (id: string, html: string) => id === "label-content-name-mismatch" && html.includes("data-box=");
    return violations
      .map(({ id, nodes }) => ({ id, html: nodes.map(({ html }) => html).filter((html) => !isMeant(id, html)) }))
      .filter(({ html }) => html.length)
      .map(({ id, html }) => `${id}: ${html.map((each) => each.slice(0, 160)).join(" | ")}`);
  }, rules);
}

export { expect };
