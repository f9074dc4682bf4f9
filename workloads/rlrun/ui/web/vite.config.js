import { readFileSync } from "node:fs";
import { defineConfig } from "vite";

/** Writes the licences of all packages whose modules are in the bundle. */
function licences() {
  return {
    name: "licences",
    generateBundle(_options, bundle) {
      const modules = Object.values(bundle).flatMap((chunk) => Object.keys(chunk.modules ?? {}));
      const folders = modules.flatMap((name) => /^.*\/node_modules\/(@[^/]+\/)?[^/]+/.exec(name)?.[0] ?? []);
      const texts = [...new Set(folders)].sort().map((folder) => {
        const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
        return `${name} ${version} (${license})\n\n${readFileSync(`${folder}/LICENSE`, "utf8").trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "licences.txt", source: texts.join("\n----\n\n") });
    },
  };
}

// One script and one style sheet: the page's Content-Security-Policy allows no inline ones.
export default defineConfig({
  base: "./",
  plugins: [licences()],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    target: ["chrome123", "firefox120", "safari17.5"], // the first that have light-dark(), which follows a chosen theme
  },
});
