import { useRef, useState } from "preact/hooks";
import { call } from "../api/client";
import type { Rule, RuleDefinition } from "../api/types";
import { go, href } from "../router";
import { ErrorBox } from "../ui/states";
import { ruleName } from "./rule-text";

/** Button and dialog that register a rule. */
export function CreateRule({ definition, disabled }: { definition: RuleDefinition; disabled: boolean }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [name, setName] = useState("");
  const [description, setDescription] = useState("");
  const [state, setState] = useState<{ error?: unknown; busy: boolean }>({ busy: false });
  const submit = async (event: Event) => {
    event.preventDefault();
    setState({ busy: true });
    try {
      const rule = {
        name: `rules/${name.trim()}`,
        definition,
        ...(description.trim() ? { description: description.trim() } : {}),
      };
      const answer = await call<{ rule: Rule }>("POST", "v1/rules", { body: { rule } });
      dialog.current?.close();
      go(href("rules", ruleName(answer.rule)));
    } catch (error) {
      setState({ error, busy: false });
    }
  };
  return (
    <>
      <button
        class="button button-primary"
        type="button"
        disabled={disabled}
        onClick={() => {
          setState({ busy: false });
          dialog.current?.showModal();
        }}
      >
        Create rule
      </button>
      <dialog ref={dialog} class="dialog" aria-labelledby="create-title">
        <form onSubmit={(event) => void submit(event)}>
          <h2 id="create-title">Create a rule</h2>
          <label class="field">
            <span>Name</span>
            <input
              class="input input-code"
              required
              autocomplete="off"
              autocapitalize="off"
              spellcheck={false}
              value={name}
              onInput={(event) => setName(event.currentTarget.value)}
            />
          </label>
          <label class="field">
            <span>Description (optional)</span>
            <input
              class="input"
              autocomplete="off"
              value={description}
              onInput={(event) => setDescription(event.currentTarget.value)}
            />
          </label>
          <p class="field-help">
            <code>{definition.expression}</code>
          </p>
          {state.error !== undefined && <ErrorBox error={state.error} />}
          <p class="row row-end">
            <button class="button" type="button" onClick={() => dialog.current?.close()}>
              Cancel
            </button>
            <button class="button button-primary" type="submit" disabled={state.busy || !name.trim()}>
              Create
            </button>
          </p>
        </form>
      </dialog>
    </>
  );
}
