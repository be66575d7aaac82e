import type { ComponentChildren } from "preact";
import { useId, useRef, useState } from "preact/hooks";
import { ErrorBox } from "./states";

/** Button that deletes something after a question. `remove` may fail: the dialog then shows why. */
export function DeleteButton({
  what,
  children,
  remove,
}: {
  what: string;
  children: ComponentChildren;
  remove: () => Promise<void>;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const title = useId();
  const [state, setState] = useState<{ error?: unknown; busy: boolean }>({ busy: false });
  const submit = async (event: Event) => {
    event.preventDefault();
    setState({ busy: true });
    try {
      await remove();
      dialog.current?.close();
    } catch (error) {
      setState({ error, busy: false });
    }
  };
  return (
    <>
      <button
        class="button button-danger"
        type="button"
        onClick={() => {
          setState({ busy: false });
          dialog.current?.showModal();
        }}
      >
        Delete
      </button>
      <dialog ref={dialog} class="dialog" aria-labelledby={title}>
        <form onSubmit={(event) => void submit(event)}>
          <h2 id={title}>Delete {what}?</h2>
          <p>{children}</p>
          {state.error !== undefined && <ErrorBox error={state.error} />}
          <p class="row row-end">
            <button class="button" type="button" autofocus onClick={() => dialog.current?.close()}>
              Cancel
            </button>
            <button class="button button-danger" type="submit" disabled={state.busy}>
              Delete
            </button>
          </p>
        </form>
      </dialog>
    </>
  );
}
