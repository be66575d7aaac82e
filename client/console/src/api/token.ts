import { useEffect, useState } from "preact/hooks";

// Session storage keeps the token over a reload and forgets it with the tab; no other tab can read it. Scripts of other origins
// cannot read it either, and the page's Content-Security-Policy allows no scripts but the console's own.
const KEY = "gradrule-token";

let token = read();
const listeners = new Set<() => void>();
const kept: (() => void)[] = [];

/** Returns the bearer token of this tab; empty if nobody signed in. */
export function bearerToken(): string {
  return token;
}

/** Sets the bearer token of this tab; an empty one signs out. */
export function setBearerToken(next: string): void {
  token = next;
  try {
    if (next) sessionStorage.setItem(KEY, next);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage is turned off: the token lasts until the page is closed or reloaded.
  }
  for (const forget of kept) forget();
  for (const listener of listeners) listener();
}

/** Returns a map for answers that outlive their page. It is emptied when the token changes: answers belong to a token. */
export function answersOfToken<Answer>(): Map<string, Answer> {
  const answers = new Map<string, Answer>();
  kept.push(() => answers.clear());
  return answers;
}

/** Returns the bearer token, and renders again when it changes. */
export function useBearerToken(): string {
  const [value, setValue] = useState(token);
  useEffect(() => {
    const listener = () => setValue(token);
    listeners.add(listener);
    listener();
    return () => void listeners.delete(listener);
  }, []);
  return value;
}

/** Tells why a text cannot be a bearer token; undefined if it can. */
export function tokenProblem(text: string): string | undefined {
  if (!text) return "Type a token.";
  if (!/^[\x21-\x7e]+$/.test(text)) return "A token has no spaces and only ASCII characters.";
  return undefined;
}

function read(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
