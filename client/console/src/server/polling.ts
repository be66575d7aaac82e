import { useEffect, useState } from "preact/hooks";
import { ApiError, call, isAbort } from "../api/client";
import type { ServerStatus } from "../api/types";

/** One answer of the server about itself. */
export interface Sample {
  /** Seconds since the page was opened. */
  at: number;
  answered: Date;
  requests: number;
  running: number;
  waiting: number;
  /** Duration of the call that asked, in milliseconds. */
  roundTrip: number;
}

export interface Polled {
  /** The last answer; with an error, the one before it. */
  status?: ServerStatus;
  error?: unknown;
  history: Sample[];
}

const INTERVAL_MS = 2000;
const KEPT = 150;

/** Asks for the status of the server every 2 s while the page is visible and not paused. */
export function useStatus(paused: boolean, attempt: number): Polled {
  const [polled, setPolled] = useState<Polled>({ history: [] });
  useEffect(() => {
    if (paused) return undefined;
    const cancel = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const poll = async () => {
      clearTimeout(timer);
      const start = performance.now();
      try {
        const { status = {} } = await call<{ status?: ServerStatus }>("GET", "v1/status", { signal: cancel.signal });
        const sample = sampleOf(status, start, performance.now() - start);
        setPolled((before) => ({ status, history: [...before.history, sample].slice(-KEPT) }));
      } catch (error) {
        if (isAbort(error) || cancel.signal.aborted) return;
        // No later call would be answered differently: wait until somebody tries again.
        if (
          error instanceof ApiError &&
          ["PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"].includes(error.problem.code ?? "")
        ) {
          setPolled({ error, history: [] });
          return;
        }
        setPolled((before) => ({ ...before, error }));
      }
      if (!cancel.signal.aborted && document.visibilityState === "visible")
        timer = setTimeout(() => void poll(), INTERVAL_MS);
    };
    const visible = () => document.visibilityState === "visible" && void poll();
    document.addEventListener("visibilitychange", visible);
    void poll();
    return () => {
      cancel.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", visible);
    };
  }, [paused, attempt]);
  return polled;
}

function sampleOf(status: ServerStatus, start: number, roundTrip: number): Sample {
  const sum = (name: "running" | "waiting") =>
    (status.engines ?? []).reduce((total, engine) => total + (engine[name] ?? 0), 0);
  return {
    at: start / 1000,
    answered: new Date(),
    requests: Number(status.requests?.used ?? 0),
    running: sum("running"),
    waiting: sum("waiting"),
    roundTrip,
  };
}
