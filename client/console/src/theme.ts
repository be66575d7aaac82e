import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";

const KEY = "gradrule-theme"; // public/theme.js reads it too.

/** Returns the chosen theme and a function that sets it, for this and later visits. */
export function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(
    (document.documentElement.dataset["theme"] as Theme | undefined) ?? "system",
  );
  const choose = (next: Theme) => {
    if (next === "system") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = next;
    try {
      if (next === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, next);
    } catch {
      // Storage is turned off: the choice lasts until the page is closed.
    }
    setTheme(next);
  };
  return [theme, choose];
}

/** Returns a number that changes with the colours of the page, for drawings on a canvas, which CSS does not reach. */
export function useColourChange(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const changed = () => setCount((before) => before + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    const chosen = new MutationObserver(changed);
    system.addEventListener("change", changed);
    chosen.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      system.removeEventListener("change", changed);
      chosen.disconnect();
    };
  }, []);
  return count;
}

/** Returns the colour of a CSS variable in the current theme, for example of `--curve-1`. */
export function cssColour(name: string): string {
  // The variable's text is `light-dark(…)`; only a property of an element resolves it.
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
