import { useEffect, useState } from "preact/hooks";

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

/** Goes to a place. With `replace`, the browser's back button skips the current one. */
export function go(link: string, { replace = false } = {}): void {
  if (replace) {
    history.replaceState(null, "", link);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = link;
  }
}

/** Returns the current route, and renders again when it changes. */
export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const update = () => setHash(location.hash);
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return parseRoute(hash);
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
