import { useEffect, useMemo, useState } from "preact/hooks";

/** Place in the console, from the part of the address after `#`: `#/rules/ste?x=1` is `["rules", "ste"]` with the query `x=1`. */
export interface Route {
  path: string[];
  query: URLSearchParams;
}

/** Reads the route of an address fragment. */
export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

/** Returns the link to a place: `href("rules", "ste")` is `#/rules/ste`. */
export function href(...path: string[]): string {
  return "#/" + path.map(encodeURIComponent).join("/");
}

/**
 * Goes to a place. With `replace`, the browser's back button skips the current one.
 *
 * A replacement shows at once; the address follows when it may, because browsers limit how often a page changes its address.
 */
export function go(link: string, { replace = false } = {}): void {
  if (replace) {
    show(link);
    if (writesLeft() >= 1) writeAddress();
    else timer ??= setTimeout(writeAddress, INTERVAL_MS);
  } else {
    writeAddress();
    location.hash = link;
  }
}

/** Returns the current route, and renders again when it changes. */
export function useRoute(): Route {
  const [hash, setHash] = useState(current);
  useEffect(() => {
    const update = () => setHash(current);
    update();
    listeners.add(update);
    return () => void listeners.delete(update);
  }, []);
  return useMemo(() => parseRoute(hash), [hash]);
}

// Safari refuses the 101st change of the address within 30 seconds: 20 at once and one every 400 ms are 95.
const INTERVAL_MS = 400;
const WRITES_AT_ONCE = 20;

/** The place that the page shows. */
let current = location.hash;
/** The address when the page last read or wrote it. */
let address = location.hash;
/** How often the address could be written at once after the last write, and when that was. */
let writesLeftAfterLastWrite = WRITES_AT_ONCE;
let writtenAt = performance.now();
let timer: ReturnType<typeof setTimeout> | undefined;
const listeners = new Set<() => void>();

function show(hash: string): void {
  current = hash;
  for (const listener of listeners) listener();
}

/** Returns how often the address may be written at once now; one more every `INTERVAL_MS`. */
function writesLeft(): number {
  return Math.min(WRITES_AT_ONCE, writesLeftAfterLastWrite + (performance.now() - writtenAt) / INTERVAL_MS);
}

/** Writes a replaced place to the address, unless the browser went elsewhere since. */
function writeAddress(): void {
  clearTimeout(timer);
  timer = undefined;
  if (current === address || location.hash !== address) return;
  writesLeftAfterLastWrite = Math.max(0, writesLeft() - 1);
  writtenAt = performance.now();
  try {
    history.replaceState(null, "", current);
    address = location.hash;
  } catch {
    // The browser's limit: try again later.
    timer = setTimeout(writeAddress, 10 * INTERVAL_MS);
  }
}

// A click may lead away: "back" then returns to this address.
window.addEventListener("click", writeAddress, { capture: true });
window.addEventListener("hashchange", () => {
  clearTimeout(timer);
  timer = undefined;
  address = location.hash;
  show(address);
});

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
