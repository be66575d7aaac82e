import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, call } from "../api/client";
import { setBearerToken, tokenProblem, useBearerToken } from "../api/token";

const OPEN = "gradrule-sign-in";

/** Opens the dialog that asks for a token. */
export function openSignIn(): void {
  window.dispatchEvent(new Event(OPEN));
}

/** Button of the header and the dialog that asks for a bearer token. */
export function SignIn() {
  const token = useBearerToken();
  const dialog = useRef<HTMLDialogElement>(null);
  const [text, setText] = useState("");
  const [problem, setProblem] = useState<string>();
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    const open = () => {
      setText("");
      setProblem(undefined);
      dialog.current?.showModal();
    };
    window.addEventListener(OPEN, open);
    return () => window.removeEventListener(OPEN, open);
  }, []);
  const submit = async (event: Event) => {
    event.preventDefault();
    const next = text.trim().replace(/^Bearer\s+/i, "");
    setBusy(true);
    const found = tokenProblem(next) ?? (await refusal(next));
    setBusy(false);
    setProblem(found);
    // Nobody waits for the answer after "Cancel".
    if (found || !dialog.current?.open) return;
    dialog.current.close();
    setBearerToken(next);
  };
  return (
    <>
      {token ? (
        <button class="button" type="button" onClick={() => setBearerToken("")}>
          Sign out
        </button>
      ) : (
        <button class="button" type="button" onClick={openSignIn}>
          Sign in
        </button>
      )}
      <dialog ref={dialog} aria-labelledby="sign-in-title" class="dialog">
        <form onSubmit={(event) => void submit(event)}>
          <h2 id="sign-in-title">Sign in</h2>
          <label class="field">
            <span>Token</span>
            <input
              class="input"
              type="password"
              autocomplete="off"
              value={text}
              aria-invalid={!!problem}
              aria-describedby="sign-in-help"
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </label>
          <p id="sign-in-help" class={problem ? "field-error" : "field-help"} role="status">
            {problem ?? "The console sends it with each call. This tab keeps it until you sign out or close the tab."}
          </p>
          <p class="row row-end">
            <button class="button" type="button" onClick={() => dialog.current?.close()}>
              Cancel
            </button>
            <button class="button button-primary" type="submit" disabled={busy}>
              Sign in
            </button>
          </p>
        </form>
      </dialog>
    </>
  );
}

/** Asks the server whether it accepts a token; tells why not, and undefined if it does. */
async function refusal(token: string): Promise<string | undefined> {
  try {
    await call("GET", "v1/rules", { query: { pageSize: 1 }, token });
    return undefined;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const { code, title, detail } = error.problem;
    if (code === "UNAUTHENTICATED") return `The server does not accept this token: ${detail}`;
    return `The server could not check the token. ${title}: ${detail}`;
  }
}
