import type { ComponentChildren } from "preact";
import { ApiError, type Problem } from "../api/client";
import { bearerToken } from "../api/token";
import { ServerText } from "./server-text";
import { openSignIn } from "./sign-in";

/** Shows an error: what happened, which fields are wrong, and what to do. */
export function ErrorBox({ error, retry }: { error: unknown; retry?: () => void }) {
  const problem = problemOf(error);
  const help = helpFor(problem.code);
  // The detail of a single violation is often the same text.
  const violations = (problem.violations ?? []).filter(({ description }) => description !== problem.detail);
  return (
    <div class="notice notice-error" role="alert">
      <p class="notice-title">
        {help?.title ?? <ServerText text={problem.title} />}
        {problem.reason && <code class="tag">{problem.reason}</code>}
      </p>
      <p class="notice-text">{problem.detail}</p>
      {violations.length > 0 && (
        <ul class="notice-text">
          {violations.map((violation) => (
            <li>
              {violation.field && <code>{violation.field}</code>} <ServerText text={violation.description} />
            </li>
          ))}
        </ul>
      )}
      {help && <p class="notice-text">{help.text}</p>}
      <p class="row">
        {(problem.code === "UNAUTHENTICATED" || problem.code === "PERMISSION_DENIED") && (
          <button class="button" type="button" onClick={openSignIn}>
            Sign in
          </button>
        )}
        {retry && (
          <button class="button" type="button" onClick={retry}>
            Try again
          </button>
        )}
      </p>
    </div>
  );
}

/** Shows that there is nothing to show yet, and what to do about it. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="notice notice-empty">
      <p class="notice-title">{title}</p>
      {children && <div class="notice-text">{children}</div>}
    </div>
  );
}

/** Shows that a first answer is on its way. `lines` reserves the room of the answer. */
export function Loading({ what, lines = 4 }: { what: string; lines?: number }) {
  return (
    <div class="loading" role="status">
      <span class="visually-hidden">Loading {what}</span>
      {Array.from({ length: lines }, () => (
        <div class="loading-line" aria-hidden="true" />
      ))}
    </div>
  );
}

/** Returns the error document of any error. */
export function problemOf(error: unknown): Problem {
  if (error instanceof ApiError) return error.problem;
  return { title: "Error in the console", status: 0, detail: error instanceof Error ? error.message : String(error) };
}

function helpFor(code: string | undefined): { title: string; text: string } | undefined {
  if (code === "UNAUTHENTICATED") {
    return {
      title: bearerToken() ? "The server does not accept this token" : "This server asks for a token",
      text: "Sign in with a token that the server accepts.",
    };
  }
  if (code === "PERMISSION_DENIED") {
    return {
      title: "This token has no access",
      text: "Sign in with a token that may do this, such as an administrator’s.",
    };
  }
  return undefined;
}
