import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { isAbort } from "./client";

/** What a page shows of a call: its last answer or its last error, and whether a call is under way. */
export interface Loaded<Answer> {
  answer?: Answer;
  error?: unknown;
  loading: boolean;
  reload: () => void;
}

/**
 * Calls `load` when the component appears, when `inputs` change, and on `reload()`.
 *
 * An earlier call is cancelled. While the next call runs, the last answer stays, so that the page does not jump; an error
 * replaces it.
 */
export function useLoad<Answer>(load: (signal: AbortSignal) => Promise<Answer>, inputs: unknown[]): Loaded<Answer> {
  const [count, setCount] = useState(0);
  const [state, setState] = useState<{ answer?: Answer; error?: unknown; loading: boolean }>({ loading: true });
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const cancel = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    latest.current(cancel.signal).then(
      (answer) => cancel.signal.aborted || setState({ answer, loading: false }),
      (error: unknown) => cancel.signal.aborted || isAbort(error) || setState({ error, loading: false }),
    );
    return () => cancel.abort();
  }, [...inputs, count]);
  const reload = useCallback(() => setCount((before) => before + 1), []);
  return { ...state, reload };
}
