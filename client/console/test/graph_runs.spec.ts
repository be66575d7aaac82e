import { deflateSync } from "node:zlib";
import type { Locator, Page } from "@playwright/test";
import { expect, test } from "./fixtures";

const SIGN = [
  'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }',
  'node { name: "s" op: "Sign" input: "x" }',
  'node { name: "y" op: "Exp" input: "s" }',
  'node { name: "z" op: "Mul" input: ["y", "x"] }',
].join("\n");
const SQUARE = [
  'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }',
  'node { name: "y" op: "Square" input: "x" }',
].join("\n");

async function paste(page: Page, text: string): Promise<void> {
  await page.getByLabel("Text or JSON").fill(text);
  await page.getByRole("button", { name: "Load text" }).click();
  await expect(page.getByRole("heading", { name: "pasted graph" })).toBeVisible();
}

async function typeValues(page: Page, placeholder: string, json: string): Promise<void> {
  await page.getByLabel("Value", { exact: true }).selectOption("values");
  await page.getByLabel(`Values of ${placeholder}`).fill(json);
}

/** Returns the numbers of all columns of a result, as shown. */
async function shownNumbers(region: Locator): Promise<number[][]> {
  const texts = await region.locator("pre").allTextContents();
  return texts.map((text) => text.trim().split(/\s+/).map(shownNumber));
}

const shownNumber = (text: string) => Number(text.replaceAll("−", "-").replace("inf", "Infinity"));

/** Returns a figure of a column, for example its norm. */
async function figure(column: Locator, name: string): Promise<number[]> {
  const texts = await column.locator(`dt:text-is("${name}") + dd`).allTextContents();
  return texts.flatMap((text) => text.split(", ").map(shownNumber));
}

/** Calls the API of the gateway, as the page's user. */
async function ask(path: string, body: unknown): Promise<{ gradients: Record<string, { values: number[] }> }> {
  const headers = {
    "Content-Type": "application/json",
    Authorization: `Bearer ${process.env["CONSOLE_ADMIN_TOKEN"]}`,
  };
  const answer = await fetch(`${process.env["CONSOLE_URL"]}/${path}`, {
    method: "POST",
    headers,
    body: JSON.stringify(body),
  });
  expect(answer.status).toBe(200);
  return (await answer.json()) as { gradients: Record<string, { values: number[] }> };
}

/** Returns a PNG of one colour per column. */
function png(columns: [number, number, number][], height: number): Buffer {
  const chunk = (kind: string, data: Buffer) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const ends = Buffer.alloc(8);
    ends.writeUInt32BE(data.length, 0);
    ends.writeUInt32BE(crc(body), 4);
    return Buffer.concat([ends.subarray(0, 4), body, ends.subarray(4)]);
  };
  const header = Buffer.alloc(13);
  header.writeUInt32BE(columns.length, 0);
  header.writeUInt32BE(height, 4);
  // Eight bits, red, green and blue.
  header.set([8, 2, 0, 0, 0], 8);
  const row = Buffer.from([0, ...columns.flat()]);
  const rows = deflateSync(Buffer.concat(Array.from({ length: height }, () => row)));
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([signature, chunk("IHDR", header), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}

function crc(bytes: Buffer): number {
  let rest = 0xffffffff;
  for (const byte of bytes) {
    rest ^= byte;
    for (let bit = 0; bit < 8; bit += 1) rest = rest & 1 ? (rest >>> 1) ^ 0xedb88320 : rest >>> 1;
  }
  return (rest ^ 0xffffffff) >>> 0;
}

test("a comparison shows the numbers of the API for each rule and for none", async ({ page, open }) => {
  await open("#/graphs");
  const uploaded = page.waitForResponse((response) => response.url().endsWith("/console/graph"));
  await paste(page, SIGN);
  const { sha256 } = (await (await uploaded).json()) as { sha256: string };
  await page.getByRole("button", { name: "Add override" }).click();
  await page.getByLabel("Matches").fill("Sign");
  await page.getByLabel("Rule", { exact: true }).fill("ste_sign");
  await typeValues(page, "x", "[-2, -0.5, 0.25, 0.75, 3]");
  await page.getByLabel("Compare with rule").fill("atan");
  await page.getByRole("button", { name: "Run" }).click();
  const region = page.getByRole("region", { name: "Gradient of x" });
  await expect(region.locator(".graph-result > b")).toHaveText(["ste_sign", "atan", "no overrides"]);

  const expected: number[][] = [];
  for (const rule of ["ste_sign", "atan", ""]) {
    const overrides = rule ? [{ selector: { opType: "Sign" }, rule }] : [];
    const spec = { graph: { blobSha256: sha256 }, overrides, vjp: { ys: ["z"], xs: ["x"] } };
    expected.push((await ask("v1/evaluate", { spec, feeds: { x: [-2, -0.5, 0.25, 0.75, 3] } })).gradients["x"]!.values);
  }
  expect(expected[0]).not.toEqual(expected[1]);
  for (const summary of await region.getByText("Numbers").all()) await summary.click();
  const shown = await shownNumbers(region);
  const norm = (values: number[]) => Math.hypot(...values);
  const [first] = expected as [number[]];
  for (const [index, values] of expected.entries()) {
    const column = region.locator(".graph-result").nth(index);
    const near = (found: number[], wanted: number[]) => {
      expect(found).toHaveLength(wanted.length);
      // Four digits are shown.
      found.forEach((value, at) =>
        expect(Math.abs(value - wanted[at]!)).toBeLessThanOrEqual(6e-4 * Math.abs(wanted[at]!) + 1e-9),
      );
    };
    near(shown[index]!, values);
    near(await figure(column, "norm"), [norm(values)]);
    near(await figure(column, "mean"), [values.reduce((sum, value) => sum + value) / 5]);
    near(await figure(column, "min, max"), [Math.min(...values), Math.max(...values)]);
    const apart = index ? [Math.max(...values.map((value, at) => Math.abs(value - first[at]!)))] : [];
    near(await figure(column, "largest difference"), apart);
    const product = values.reduce((sum, value, at) => sum + value * first[at]!, 0);
    near(await figure(column, "cosine"), index ? [product / norm(values) / norm(first)] : []);
  }
});

test("a rule that does not fit says so in its column, and the others are shown", async ({ page, open }) => {
  await open("#/graphs");
  await page.getByRole("button", { name: /^Binary network/ }).click();
  await expect(page.getByRole("region", { name: "Gradient of x" })).toBeVisible();
  await page.getByLabel("Compare with rule").fill("no_such_rule");
  await page.getByRole("button", { name: "Run" }).click();
  await expect(page.getByRole("region", { name: "Results" })).toContainText("no_such_rule:");
  const titles = page.getByRole("region", { name: "Gradient of x" }).locator(".graph-result > b");
  await expect(titles).toHaveText(["ste_sign (clip=1)", "no_such_rule", "no overrides"]);
});

test("an image file becomes the value of a placeholder", async ({ page, open }) => {
  await open("#/graphs");
  await paste(page, SQUARE);
  await page.getByLabel("Value", { exact: true }).selectOption("image");
  await page.getByLabel("Shape").fill("1, 8, 8, 3");
  await page.getByRole("button", { name: "Run" }).click();
  await expect(page.getByRole("alert")).toContainText("Choose an image for x");
  const file = page.getByLabel("Image for x");
  await file.setInputFiles({ name: "notes.png", mimeType: "image/png", buffer: Buffer.from("no image") });
  await expect(page.getByText("notes.png is not an image")).toBeVisible();
  const columns = Array.from({ length: 8 }, (_, at): [number, number, number] => (at < 4 ? [255, 0, 51] : [0, 102, 0]));
  await file.setInputFiles({ name: "two.png", mimeType: "image/png", buffer: png(columns, 8) });
  await expect(page.getByText("notes.png is not an image")).toHaveCount(0);
  const sent = page.waitForRequest((request) => request.url().endsWith("/v1/evaluate"));
  await page.getByRole("button", { name: "Run" }).click();
  const { feeds } = (await sent).postDataJSON() as { feeds: { x: number[][][][] } };
  const row = columns.map((colour) => colour.map((channel) => channel / 255));
  expect(feeds.x).toEqual([Array.from({ length: 8 }, () => row)]);
  const gradients = page.getByRole("region", { name: "Gradient of x" });
  // The gradient of x² is 2x; the mean of the channels is drawn.
  await expect(gradients.getByText("mean of 3 channels; blue −2, white 0, orange 2")).toBeVisible();
  const corner = () =>
    gradients.locator("canvas").evaluate((canvas) => {
      const { data } = (canvas as HTMLCanvasElement).getContext("2d")!.getImageData(0, 0, 1, 1);
      return [...data];
    });
  // (2 + 0 + 0.4) / 3 of 2 is 0.4: 40 % of the way from white to orange.
  await expect.poll(corner).toEqual([238, 191, 153, 255]);
  await expect(page.getByRole("region", { name: "Output y" }).getByText("colours from 0 to 1")).toBeVisible();
});

test("a stored program is chosen and run", async ({ page, open }) => {
  await open("#/graphs");
  await page.getByRole("region", { name: "Stored programs" }).getByRole("button", { name: "binary-net" }).click();
  await expect(page.getByRole("heading", { name: "binary-net" })).toBeVisible();
  await typeValues(page, "x", "[[-0.5, 0.25, 3]]");
  await page.getByRole("button", { name: "Run" }).click();
  const region = page.getByRole("region", { name: "Gradient of x" });
  await region.getByText("Numbers").click();
  const answer = await ask("v1/evaluate", { program: "programs/binary-net", feeds: { x: [[-0.5, 0.25, 3]] } });
  // d(sign(x)²)/dx with a straight-through gradient.
  expect(answer.gradients["x"]!.values).toEqual([[-2, 2, 2]]);
  expect(await shownNumbers(region)).toEqual([[-2, 2, 2]]);
  await typeValues(page, "x", "[[1, 2]]");
  await page.getByRole("button", { name: "Run" }).click();
  await expect(page.getByRole("alert")).toContainText("x");
});

for (const path of ["console/picture", "v1/evaluate"]) {
  test(`a graph that the server deleted is sent again: ${path}`, async ({ page, open }) => {
    await open("#/graphs");
    let uploads = 0;
    page.on("request", (request) => (uploads += Number(request.url().endsWith("/console/graph"))));
    const answers: string[] = [];
    // The first call names a graph that the server does not have, as after a deletion; its answer is the server's own.
    await page.route(
      `**/${path}`,
      async (route) => {
        const postData = route
          .request()
          .postData()!
          .replace(/"blobSha256":"[0-9a-f]+"/, `"blobSha256":"${"0".repeat(64)}"`);
        const response = await route.fetch({ postData });
        answers.push(await response.text());
        await route.fulfill({ response });
      },
      { times: 1 },
    );
    await paste(page, SQUARE);
    await typeValues(page, "x", "[3, -2]");
    await page.getByRole("button", { name: "Run" }).click();
    const gradients = page.getByRole("region", { name: "Gradient of x" });
    await gradients.getByText("Numbers").click();
    expect(await shownNumbers(gradients)).toEqual([[6, -4]]);
    expect(answers[0]).toContain("BLOB_NOT_FOUND");
    expect(uploads).toBe(2);
  });
}

test("an error is shown at its node", async ({ page, open }) => {
  await open("#/graphs");
  await paste(page, SIGN);
  await expect(page.locator("[data-box].wrong")).toHaveCount(0);
  await page.getByRole("button", { name: "Add override" }).click();
  await page.getByLabel("Matches").fill("Mul");
  await page.getByLabel("Rule", { exact: true }).fill("ste_sign");
  const alert = page.getByRole("alert");
  await expect(alert).toContainText("ste_sign");
  const wrong = page.locator("[data-box].leaf.wrong");
  await expect(wrong).toHaveCount(1);
  await expect(wrong).toHaveAttribute("aria-label", /^z,/);
  await alert.getByRole("button", { name: "Show z" }).click();
  const details = page.getByRole("complementary", { name: "Details" });
  await expect(details.getByRole("heading", { name: "z" })).toBeVisible();
  await expect(details).toContainText("ste_sign");
  await expect(details.locator("dd.gv-wrong")).toBeVisible();
});

test.describe("hostile graphs", () => {
  test("names with HTML are text", async ({ page, open }) => {
    let alerted = false;
    page.on("dialog", (dialog) => ((alerted = true), void dialog.dismiss()));
    await open("#/graphs");
    const name = "<img src=x onerror=alert(1)>";
    const graph = {
      node: [
        { name, op: "Placeholder", attr: { dtype: { type: "DT_FLOAT" } } },
        { name: "</script><script>alert(2)</script>", op: '"><svg onload=alert(3)>', input: [name] },
      ],
    };
    const buffer = Buffer.from(JSON.stringify(graph));
    await page.getByLabel("File").setInputFiles({ name: "<b>graph</b>.json", mimeType: "application/json", buffer });
    await expect(page.getByRole("alert").first()).toBeVisible();
    await expect(page.locator("main")).toContainText(name);
    expect(await page.locator("main img, main script, main h1 b").count()).toBe(0);
    expect(alerted).toBe(false);
  });

  test("five thousand nodes are drawn, searched and run", async ({ page, open }) => {
    await open("#/graphs");
    const nodes = Array.from({ length: 5000 }, (_, at) => ({
      name: `block_${Math.floor(at / 50)}/neg_${at}`,
      op: "Neg",
      input: [at ? `block_${Math.floor((at - 1) / 50)}/neg_${at - 1}` : "x"],
    }));
    const graph = { node: [{ name: "x", op: "Placeholder", attr: { dtype: { type: "DT_FLOAT" } } }, ...nodes] };
    const buffer = Buffer.from(JSON.stringify(graph));
    await page.getByLabel("File").setInputFiles({ name: "chain.json", mimeType: "application/json", buffer });
    await expect(page.getByText("5001 nodes, ")).toBeVisible();
    await expect(page.locator("[data-box]").first()).toBeVisible();
    expect(await page.locator("[data-box]").count()).toBeLessThanOrEqual(300);
    await page.getByRole("searchbox").fill("neg_4321");
    await expect(page.getByRole("complementary", { name: "Details" })).toContainText("block_86/neg_4321");
    await typeValues(page, "x", "[2, -7]");
    await page.getByRole("button", { name: "Run" }).click();
    const output = page.getByRole("region", { name: /^Output block_99/ });
    await output.getByText("Numbers").click();
    // An even number of negations.
    expect(await shownNumbers(output)).toEqual([[2, -7]]);
  });

  test("bytes that are no graph are refused with the reason", async ({ page, open }) => {
    await open("#/graphs");
    for (const bytes of [Buffer.from([0xff, 0xff, 0x00]), Buffer.from("node { nme: 3"), Buffer.from('{"node": 1}')]) {
      await page.getByLabel("File").setInputFiles({ name: "graph.pb", mimeType: "", buffer: bytes });
      await expect(page.getByRole("alert")).toContainText("INVALID_GRAPH");
      await page.getByLabel("Text or JSON").fill("");
    }
    // The page can be used afterwards.
    await paste(page, SQUARE);
    await expect(page.locator("[data-box]").first()).toBeVisible();
  });
});

test.describe("without a token", () => {
  test.use({ token: "" });
  test("a large graph is refused before it is sent completely, and the page says what to do", async ({
    page,
    open,
  }) => {
    await open("#/graphs");
    // The list of programs is refused too.
    await expect(page.getByRole("alert")).toHaveCount(1);
    const buffer = Buffer.alloc(8 << 20, 0x20);
    await page.getByLabel("File").setInputFiles({ name: "graph.pb", mimeType: "", buffer });
    await expect(page.getByRole("alert")).toHaveCount(2);
    for (const alert of await page.getByRole("alert").all()) {
      await expect(alert).toContainText("UNAUTHENTICATED");
      await expect(alert.getByRole("button", { name: "Sign in" })).toBeVisible();
    }
  });
});
