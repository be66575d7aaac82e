import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

// The gateway serves the built files, so they are part of its package.
const OUTPUT = fileURLToPath(new URL("../../server/gradrule_gateway/console", import.meta.url));

export default defineConfig({
  base: "./",
  build: {
    outDir: process.env["CONSOLE_OUTPUT"] ?? OUTPUT,
    emptyOutDir: true,
    // The first versions with CSS's light-dark().
    target: ["chrome123", "firefox120", "safari17.5"],
    // Inlined files would be `data:` URLs, which the page's Content-Security-Policy forbids.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // The licences of the libraries inside ask for it.
    license: { fileName: "assets/licenses.md" },
    rollupOptions: {
      output: {
        // Names without hashes: a rebuilt file replaces the earlier one in Git. The gateway makes browsers revalidate them.
        entryFileNames: "assets/[name].js",
        chunkFileNames: ({ facadeModuleId }) =>
          `assets/${facadeModuleId?.match(/src\/(\w+)\/page/)?.[1] ?? "[name]"}.js`,
        assetFileNames: "assets/[name][extname]",
      },
    },
  },
  server: {
    proxy: { "^/(v1|healthz|openapi.json)": process.env["GATEWAY"] ?? "http://127.0.0.1:8480" },
  },
});
