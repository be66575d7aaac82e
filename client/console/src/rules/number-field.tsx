import { useEffect, useState } from "preact/hooks";

/** Input of a number. `inf`, `-inf` and `nan` are numbers too. Calls `onChange` only with numbers. */
export function NumberField({
  label,
  hidden,
  value,
  isWrong = false,
  onChange,
}: {
  label: string;
  hidden?: boolean;
  value: number;
  /** The number does not fit to another field. */
  isWrong?: boolean;
  onChange: (value: number) => void;
}) {
  const [text, setText] = useState(textOf(value));
  // Do not replace what somebody is typing: `1.` and `1` are the same number.
  useEffect(() => setText((before) => (Object.is(parseNumber(before), value) ? before : textOf(value))), [value]);
  return (
    <label class="field">
      <span class={hidden ? "visually-hidden" : undefined}>{label}</span>
      <input
        class="input input-code number-field"
        inputMode="decimal"
        autocomplete="off"
        value={text}
        aria-invalid={isWrong || parseNumber(text) === undefined}
        onInput={(event) => {
          setText(event.currentTarget.value);
          const next = parseNumber(event.currentTarget.value);
          if (next !== undefined) onChange(next);
        }}
        onKeyDown={(event) => {
          const step = event.key === "ArrowUp" ? 1 : event.key === "ArrowDown" ? -1 : 0;
          if (!step || !Number.isFinite(value)) return;
          event.preventDefault();
          const size = 10 ** (Math.floor(Math.log10(Math.abs(value) || 1)) - 1);
          onChange(Number((value + step * size).toPrecision(12)));
        }}
      />
    </label>
  );
}

/** Reads a number as Python writes it; undefined if the text is none. */
export function parseNumber(text: string): number | undefined {
  const word = text.trim().toLowerCase().replace("−", "-");
  if (word === "nan") return NaN;
  if (/^[+-]?inf(inity)?$/.test(word)) return word.startsWith("-") ? -Infinity : Infinity;
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(word)) return undefined;
  return Number(word);
}

function textOf(value: number): string {
  return Number.isFinite(value) ? String(value) : Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}
