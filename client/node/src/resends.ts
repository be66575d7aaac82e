// Decides whether and when a call is sent again after its server was lost; the Python client has the same rules.

import { status as Code } from "@grpc/grpc-js";
import type { ServiceError } from "@grpc/grpc-js";

import { isUnreached } from "./status.js";

// Time in which a proxy gets another server, and in which a server that answered a minute ago listens again.
const RESEND_MS = 30_000;
const RESTART_MS = 10_000;
const ANSWERED_WITHIN_MS = 60_000;
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 4_000;

/** What became of an attempt: no answer of a server that was reached, no server reached, or an error that a server sent. */
export type Loss = "lost" | "unreached" | "refused";

/** Returns what became of an attempt that failed; undefined if another attempt does not help. `failure`: undefined if a stream ended. */
export function lossOf(failure: ServiceError | undefined): Loss | undefined {
  if (failure === undefined) return "lost";
  if (failure.code !== Code.UNAVAILABLE) return undefined;
  if (isUnreached(failure)) return "unreached";
  // Servers add the id of the request to each error.
  return failure.metadata?.get("x-request-id").length ? "refused" : "lost";
}

/**
 * The attempts of one call. A call that was lost with its server, or that a proxy could not pass on, is sent again for 30 s; a call
 * to a server that answered within the minute before it, but does not listen any more, for 10 s. A call that reaches no server
 * otherwise has few attempts, because the address may be wrong.
 */
export class Resends {
  private readonly wasReached: boolean;
  private attempts = 0;
  private until: number | undefined;

  /** `answeredAt`, `deadline`: in ms since 1970. `tries`: attempts if no server is reached. */
  constructor(
    answeredAt: number,
    private readonly deadline: number,
    private readonly tries = 1,
  ) {
    this.wasReached = Date.now() - answeredAt < ANSWERED_WITHIN_MS;
  }

  /** Returns the ms to wait before the next attempt; undefined if there is none. */
  pauseAfter(loss: Loss): number | undefined {
    this.attempts += 1;
    const now = Date.now();
    if (this.until === undefined && (loss === "lost" || (loss === "unreached" && this.wasReached))) {
      this.until = Math.min(this.deadline, now + (loss === "lost" ? RESEND_MS : RESTART_MS));
    }
    const longest = Math.min(FIRST_PAUSE_MS * 2 ** (this.attempts - 1), LONGEST_PAUSE_MS);
    // Clients that have lost the same server must not come back at the same time.
    const pause = longest * (0.5 + Math.random() / 2);
    const until = this.attempts < this.tries ? this.deadline : (this.until ?? 0);
    return now + pause < until ? pause : undefined;
  }
}
