import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

// The Python client writes these files into the page of `gradrule explain --html`, so they are part of its package.
const OUTPUT = fileURLToPath(new URL("../python/gradrule/_picture", import.meta.url));

export default defineConfig({
  // The page is one file; nothing is copied beside it.
  publicDir: false,
  build: {
    outDir: process.env["EXPLAIN_OUTPUT"] ?? OUTPUT,
    emptyOutDir: false,
    target: ["chrome123", "firefox120", "safari17.5"],
    modulePreload: { polyfill: false },
    lib: {
      entry: fileURLToPath(new URL("src/graphs/view/explain_page.ts", import.meta.url)),
      formats: ["iife"],
      name: "gradruleGraph",
      fileName: () => "graph_page.js",
      cssFileName: "graph_page",
    },
  },
});
