import { useLoad } from "../api/load";
import { ruleNames } from "./api";
import { type OverrideRow, SELECTORS, type SpecForm } from "./spec";
import type { GraphFacts } from "./types";

export interface SpecEditorProps {
  facts: GraphFacts;
  form: SpecForm;
  onChange: (form: SpecForm) => void;
}

const NEW_ROW: OverrideRow = { kind: "opType", value: "", rule: "", params: "" };

/** Edits what to compute: ys, xs, fetches, and the overrides in order. */
export function SpecEditor({ facts, form, onChange }: SpecEditorProps) {
  const rules = useLoad(ruleNames, []);
  const change = (index: number, part: Partial<OverrideRow>) =>
    onChange({ ...form, overrides: form.overrides.map((row, at) => (at === index ? { ...row, ...part } : row)) });
  const move = (index: number, by: number) => {
    const overrides = [...form.overrides];
    const [row] = overrides.splice(index, 1);
    overrides.splice(index + by, 0, row!);
    onChange({ ...form, overrides });
  };
  const field = (name: "ys" | "xs" | "fetches", label: string, help: string) => (
    <label class="field">
      <span>{label}</span>
      <input
        class="input input-code"
        list="graph-nodes"
        value={form[name]}
        onInput={(event) => onChange({ ...form, [name]: event.currentTarget.value })}
      />
      <span class="field-help">{help}</span>
    </label>
  );
  return (
    <>
      <datalist id="graph-nodes">
        {facts.nodes.slice(0, 1000).map((name) => (
          <option value={name} />
        ))}
      </datalist>
      <datalist id="graph-ops">
        {facts.ops.map((name) => (
          <option value={name} />
        ))}
      </datalist>
      <datalist id="graph-rules">
        {["default", ...(rules.answer ?? [])].map((name) => (
          <option value={name} />
        ))}
      </datalist>
      <div class="graph-fields">
        {field("ys", "ys", "Tensors to differentiate")}
        {field("xs", "xs", "With respect to")}
        {field("fetches", "Fetches", "Tensors to return")}
      </div>
      <fieldset class="graph-overrides">
        <legend>Overrides: the first that matches a node applies</legend>
        {form.overrides.length > 0 && (
          <div class="graph-override graph-override-head" aria-hidden="true">
            {["Selector", "Matches", "Rule", "Params"].map((title) => (
              <span>{title}</span>
            ))}
          </div>
        )}
        {form.overrides.map((row, index) => (
          <div class="graph-override" role="group" aria-label={`Override ${index + 1}`}>
            <select
              class="select"
              aria-label="Selector"
              value={row.kind}
              onChange={(event) => change(index, { kind: event.currentTarget.value as OverrideRow["kind"] })}
            >
              {Object.entries(SELECTORS).map(([kind, title]) => (
                <option value={kind}>{title}</option>
              ))}
            </select>
            <input
              class="input input-code"
              aria-label="Matches"
              placeholder={row.kind === "opType" ? "Relu" : "block_1/**"}
              list={row.kind === "opType" ? "graph-ops" : "graph-nodes"}
              value={row.value}
              onInput={(event) => change(index, { value: event.currentTarget.value })}
            />
            <input
              class="input input-code"
              aria-label="Rule"
              placeholder="rule"
              list="graph-rules"
              value={row.rule}
              onInput={(event) => change(index, { rule: event.currentTarget.value })}
            />
            <input
              class="input input-code"
              aria-label="Params"
              placeholder="clip=1"
              value={row.params}
              onInput={(event) => change(index, { params: event.currentTarget.value })}
            />
            <span class="graph-override-actions">
              <button
                class="button button-small"
                type="button"
                aria-label="Move up"
                disabled={!index}
                onClick={() => move(index, -1)}
              >
                ↑
              </button>
              <button
                class="button button-small"
                type="button"
                aria-label="Remove"
                onClick={() => onChange({ ...form, overrides: form.overrides.filter((_, at) => at !== index) })}
              >
                ×
              </button>
            </span>
          </div>
        ))}
        <button
          class="button button-small"
          type="button"
          onClick={() => onChange({ ...form, overrides: [...form.overrides, NEW_ROW] })}
        >
          Add override
        </button>
      </fieldset>
    </>
  );
}
