import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { isAbort } from "./client";

/** One page of a list, and the token of the next one; without it, the page is the last. */
export interface ListPage<Item> {
  items: Item[];
  nextPageToken?: string | undefined;
}

/** What a page shows of a list that the server returns in pages. */
export interface Listed<Item> {
  items: Item[];
  /** The list has no more pages. */
  isComplete: boolean;
  loading: boolean;
  error?: unknown;
  /** Tries the page that failed again. */
  retry: () => void;
  /** Loads the list from its start. */
  reload: () => void;
}

interface State<Item> {
  items: Item[];
  /** Pages since the last start. */
  pages: number;
  nextPageToken?: string | undefined;
  error?: unknown;
}

/** Loads pages of a list, each once, until it has `wanted` items or the list ends. */
export function useList<Item>(
  load: (pageToken: string | undefined, signal: AbortSignal) => Promise<ListPage<Item>>,
  wanted: number,
): Listed<Item> {
  const [state, setState] = useState<State<Item>>({ items: [], pages: 0 });
  const [attempt, setAttempt] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const isComplete = state.pages > 0 && !state.nextPageToken;
  const isShort = state.pages === 0 || (!isComplete && state.items.length < wanted);
  useEffect(() => {
    if (!isShort) return undefined;
    const cancel = new AbortController();
    latest.current(state.nextPageToken, cancel.signal).then(
      ({ items, nextPageToken }) =>
        cancel.signal.aborted ||
        setState((before) => ({
          // A list that starts again is shown until its first page is there.
          items: before.pages ? [...before.items, ...items] : items,
          pages: before.pages + 1,
          nextPageToken,
        })),
      (error: unknown) =>
        cancel.signal.aborted ||
        isAbort(error) ||
        setState((before) => ({ ...before, items: before.pages ? before.items : [], error })),
    );
    return () => cancel.abort();
  }, [state.pages, isShort, attempt]);
  const retry = useCallback(() => {
    setState(({ error: _, ...before }) => before);
    setAttempt((before) => before + 1);
  }, []);
  const reload = useCallback(() => {
    setState(({ items }) => ({ items, pages: 0 }));
    setAttempt((before) => before + 1);
  }, []);
  const { items, error } = state;
  return { items, isComplete, loading: isShort && error === undefined, error, retry, reload };
}
