import { useEffect, useRef, useState } from "preact/hooks";

/** Copies text. Without the right to write the clipboard, as on pages without TLS, an old command of the browser does it. */
export async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Button that copies a text and says so. */
export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const [copied, copy] = useCopied();
  return (
    <button class="button button-small copy" type="button" aria-label={label} onClick={() => copy(text)}>
      {/* Both words take the same room, so that nothing moves. */}
      <span class={copied ? "copy-hidden" : undefined}>Copy</span>
      <span class={copied ? undefined : "copy-hidden"} role="status">
        {copied ? "Copied" : ""}
      </span>
    </button>
  );
}

/** Text in a frame with a copy button. */
export function CodeBlock({ code, label }: { code: string; label: string }) {
  return (
    <div class="code-block">
      <pre tabIndex={0} role="region" aria-label={label}>
        <code>{code}</code>
      </pre>
      <CopyButton text={code} label={`Copy ${label}`} />
    </div>
  );
}

/** Button that opens a list of texts to copy. */
export function CopyMenu({ name, items }: { name: string; items: { label: string; text: string }[] }) {
  const [copied, copy] = useCopied();
  const details = useRef<HTMLDetailsElement>(null);
  const close = (focus: boolean) => {
    details.current?.removeAttribute("open");
    if (focus) details.current?.querySelector("summary")?.focus();
  };
  return (
    <details
      class="menu"
      ref={details}
      onKeyDown={(event) => event.key === "Escape" && close(true)}
      onFocusOut={(event) => !details.current?.contains(event.relatedTarget as Node | null) && close(false)}
    >
      <summary class="button button-small" aria-label={`Copy ${name}`}>
        {copied ? "Copied" : "Copy"}
      </summary>
      <div class="menu-items">
        {items.map(({ label, text }) => (
          <button
            type="button"
            onClick={() => {
              copy(text);
              close(true);
            }}
          >
            {label}
          </button>
        ))}
      </div>
      <span class="visually-hidden" role="status">
        {copied ? "Copied" : ""}
      </span>
    </details>
  );
}

function useCopied(): [boolean, (text: string) => void] {
  const [count, setCount] = useState(0);
  useEffect(() => {
    if (!count) return undefined;
    const timer = setTimeout(() => setCount(0), 1500);
    return () => clearTimeout(timer);
  }, [count]);
  return [count > 0, (text) => void copyText(text).then(() => setCount((before) => before + 1))];
}
