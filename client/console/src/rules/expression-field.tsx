import { useId } from "preact/hooks";

export interface ExpressionError {
  message: string;
  /** Column of the error, from 1. */
  column?: number;
}

/** Input of an expression. The column of an error is marked in the text. */
export function ExpressionField({
  value,
  error,
  onChange,
}: {
  value: string;
  error: ExpressionError | undefined;
  onChange: (value: string) => void;
}) {
  const help = useId();
  // The server's message ends with a list of everything that would be right.
  const [main, more] = error?.message.split(/\s(?=Functions: |Names are )/) ?? [];
  const characters = [...value];
  const at = error?.column === undefined ? undefined : error.column - 1;
  return (
    <div class="field">
      <label for="expression">Expression</label>
      <div class="expression">
        {/* The same text behind the input carries the mark. */}
        <pre class="expression-mark" aria-hidden="true">
          {at === undefined ? value : characters.slice(0, at).join("")}
          {at !== undefined && <mark>{characters[at] ?? " "}</mark>}
          {at !== undefined && characters.slice(at + 1).join("")}
        </pre>
        <textarea
          id="expression"
          class="input input-code"
          rows={1}
          spellcheck={false}
          autocapitalize="off"
          autocomplete="off"
          value={value}
          aria-invalid={error !== undefined}
          aria-describedby={help}
          onInput={(event) => onChange(event.currentTarget.value.replace(/\s*\n\s*/g, " "))}
          onKeyDown={(event) => event.key === "Enter" && event.preventDefault()}
        />
      </div>
      <p id={help} class={error ? "field-error expression-help" : "field-help expression-help"} role="status">
        {error ? (
          <>
            {error.column !== undefined && <strong>Column {error.column}: </strong>}
            {main}
            {more && (
              <details>
                <summary>{more.startsWith("Functions") ? "All functions" : "All names"}</summary>
                {more}
              </details>
            )}
          </>
        ) : (
          "A formula over x, y, dy, default and the params, for example dy * (1 - y ** 2)."
        )}
      </p>
    </div>
  );
}
