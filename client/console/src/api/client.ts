import { recordCall } from "./timing";
import { bearerToken } from "./token";

/** One field of a request that the server refused. */
export interface Violation {
  field?: string;
  description: string;
  reason?: string;
  node?: string;
}

/** The gateway's error document (application/problem+json). */
export interface Problem {
  title: string;
  status: number;
  detail: string;
  /** ErrorReason of gradrule, for example `UNKNOWN_RULE`. */
  reason?: string;
  /** gRPC status, for example `NOT_FOUND`. */
  code?: string;
  metadata?: Record<string, string>;
  violations?: Violation[];
  retryAfterSeconds?: number;
}

/** An error that the gateway answered with, or status 0 if it did not answer. */
export class ApiError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail || problem.title);
    this.name = "ApiError";
  }
}

export interface CallOptions {
  /** Body of the request; sent as JSON. */
  body?: unknown;
  query?: Record<string, string | number | undefined>;
  /** Cancels the call; the gateway then cancels its call to the server. */
  signal?: AbortSignal;
  /** Token to send in place of the tab's. */
  token?: string;
}

export type Method = "GET" | "POST" | "DELETE";

/**
 * Calls the gateway and returns its JSON answer.
 *
 * @param path Path below the gateway's root, for example `v1/rules`. Escape names with encodeURIComponent.
 * @throws ApiError if the answer is an error or the gateway cannot be reached; AbortError if `signal` cancelled the call.
 */
export async function call<Answer>(method: Method, path: string, options: CallOptions = {}): Promise<Answer> {
  const { body, query, signal, token = bearerToken() } = options;
  const headers: Record<string, string> = { Accept: "application/json" };
  const request: RequestInit = { method, headers, cache: "no-store" };
  if (signal) request.signal = signal;
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  if (token) headers["Authorization"] = `Bearer ${token}`;
  let response: Response;
  let text: string;
  const start = performance.now();
  try {
    response = await fetch(path + queryText(query), request);
    text = await response.text();
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError({
      title: "The gateway does not answer",
      status: 0,
      detail: "Check that `gradrule gateway` is running and that the network reaches it.",
    });
  }
  const answer = parse(text);
  recordCall(method, path, performance.now() - start, response.ok, answer);
  if (!response.ok) throw new ApiError(problem(response, answer, text));
  if (answer === undefined) {
    throw new ApiError({ title: "The answer is not JSON", status: response.status, detail: excerpt(text) });
  }
  return answer as Answer;
}

/** Tells whether an error means that the call was cancelled. */
export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

function queryText(query: CallOptions["query"]): string {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== "");
  return given.length ? "?" + new URLSearchParams(given.map(([name, value]) => [name, String(value)])) : "";
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function problem(response: Response, answer: unknown, text: string): Problem {
  if (typeof answer === "object" && answer !== null && "detail" in answer) {
    return { title: response.statusText, ...(answer as Partial<Problem>), status: response.status } as Problem;
  }
  // A proxy between browser and gateway answers with a page of its own.
  return { title: response.statusText || "Error", status: response.status, detail: excerpt(text) };
}

function excerpt(text: string): string {
  return text.length > 300 ? text.slice(0, 300) + "…" : text;
}
