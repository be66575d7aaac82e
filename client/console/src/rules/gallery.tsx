import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../api/client";
import { useLoad } from "../api/load";
import type { Rule, RuleKind } from "../api/types";
import { go, href, type Route } from "../router";
import { CopyMenu } from "../ui/copy";
import { Empty, ErrorBox, Loading } from "../ui/states";
import { FAMILIES, formulaOf, PURPOSES, ruleName, snippetsOf } from "./rule-text";
import { Thumbnail } from "./thumbnail";

const KINDS: { value: string; label: string; kinds: RuleKind[] }[] = [
  { value: "", label: "Built-in and own", kinds: ["RULE_KIND_USER", "RULE_KIND_BUILTIN"] },
  { value: "user", label: "Own", kinds: ["RULE_KIND_USER"] },
  { value: "builtin", label: "Built-in", kinds: ["RULE_KIND_BUILTIN"] },
  { value: "op", label: "TensorFlow ops", kinds: ["RULE_KIND_OP"] },
];

/** Cards of a section that are shown at first, and that each click adds. */
const SHOWN = 100;

/** Page with all rules: curves, search and filters. */
export function Gallery({ route }: { route: Route }) {
  const search = route.query.get("search") ?? "";
  const family = route.query.get("family") ?? "";
  const kind = KINDS.find(({ value }) => value === route.query.get("kind")) ?? KINDS[0]!;
  const { answer, error, reload } = useLoad((signal) => listRules(kind.kinds, signal), [kind.value]);
  const box = useRef<HTMLInputElement>(null);
  useSearchKey(box);
  const set = (name: string, value: string) => {
    const query = new URLSearchParams(route.query);
    if (value) query.set(name, value);
    else query.delete(name);
    go(`#/rules${query.size ? `?${query}` : ""}`, { replace: true });
  };
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (answer ?? []).filter((rule) => (!family || rule.family === family) && matches(rule, words));
  const families = [...new Set((answer ?? []).flatMap((rule) => rule.family ?? []))].sort(byFamily);
  return (
    <>
      <div class="page-head">
        <div>
          <h1>Rules</h1>
          <p class="muted">Each curve is a gradient over x, for an upstream gradient of 1.</p>
        </div>
        <a class="button button-primary" href="#/playground">
          Open the playground
        </a>
      </div>
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="field filters-search">
          <span>Search</span>
          <input
            ref={box}
            class="input"
            type="search"
            placeholder="Name, formula, op or paper"
            value={search}
            aria-keyshortcuts="/"
            onInput={(event) => set("search", event.currentTarget.value)}
          />
        </label>
        <label class="field">
          <span>Kind</span>
          <select class="select" value={kind.value} onChange={(event) => set("kind", event.currentTarget.value)}>
            {KINDS.map(({ value, label }) => (
              <option value={value}>{label}</option>
            ))}
          </select>
        </label>
        <label class="field">
          <span>Family</span>
          <select class="select" value={family} onChange={(event) => set("family", event.currentTarget.value)}>
            <option value="">All</option>
            {families.map((name) => (
              <option value={name}>{FAMILIES[name] ?? name}</option>
            ))}
          </select>
        </label>
        <p class="filters-count small muted number" role="status">
          {answer ? `${found.length.toLocaleString("en")} of ${answer.length.toLocaleString("en")} rules` : "…"}
        </p>
      </form>
      <p class="legend small">
        <LegendItem of="curve-gradient" text="gradient" />
        <LegendItem of="curve-opposite" text="for dy = −1, unless it is just the negative" />
        <LegendItem of="curve-forward" text="the op" />
      </p>
      {error !== undefined && <ErrorBox error={error} retry={reload} />}
      {!answer && error === undefined && <Loading what="the rules" lines={9} />}
      {answer && !found.length && (
        <Empty title={answer.length ? "No rule matches" : "No rules of your own yet"}>
          {answer.length ? (
            "Search for another word, or choose another kind or family."
          ) : (
            <>
              Write one in <a href="#/playground">the playground</a>.
            </>
          )}
        </Empty>
      )}
      {sectionsOf(found).map((section) => (
        <SectionOfRules key={section.title} section={section} filters={String(route.query)} />
      ))}
    </>
  );
}

function SectionOfRules({ section, filters }: { section: Section; filters: string }) {
  const { title, purpose, rules } = section;
  // Other filters start with few cards again.
  const [more, setMore] = useState({ filters, count: 0 });
  const shown = SHOWN + (more.filters === filters ? more.count : 0);
  return (
    <section class="stack">
      <h2>
        {title} <span class="section-purpose muted">{purpose}</span>
      </h2>
      <div class="gallery">
        {rules.slice(0, shown).map((rule) => (
          <Card key={`${rule.kind} ${rule.name}`} rule={rule} />
        ))}
      </div>
      {rules.length > shown && (
        <p class="row">
          <button class="button" type="button" onClick={() => setMore({ filters, count: shown })}>
            Show more
          </button>
          <span class="small muted number">
            {shown.toLocaleString("en")} of {rules.length.toLocaleString("en")} are shown.
          </span>
        </p>
      )}
    </section>
  );
}

function LegendItem({ of, text }: { of: string; text: string }) {
  return (
    <span class="legend-item">
      <svg class="legend-line" viewBox="0 0 24 8" aria-hidden="true">
        <path class={of} d="M0 4h24" />
      </svg>
      {text}
    </span>
  );
}

function Card({ rule }: { rule: Rule }) {
  const name = ruleName(rule);
  return (
    <article class="card rule-card">
      <div class="rule-card-head">
        <h3>
          <a href={href("rules", name)}>{name}</a>
        </h3>
        {rule.trueGradient && <span class="tag tag-good">true gradient</span>}
        {rule.kind === "RULE_KIND_USER" && <span class="tag">own</span>}
      </div>
      <Thumbnail key={rule.digest} rule={rule} />
      <div class="rule-card-foot">
        <code class="rule-card-formula" title={formulaOf(rule)}>
          {formulaOf(rule)}
        </code>
        <CopyMenu name={name} items={copyItems(rule)} />
      </div>
    </article>
  );
}

/** Returns what can be copied of a rule. */
export function copyItems(rule: Rule): { label: string; text: string }[] {
  const { python, json } = snippetsOf(rule);
  const expression = rule.definition?.expression;
  return [
    { label: "Name", text: ruleName(rule) },
    ...(expression ? [{ label: "Expression", text: expression }] : []),
    { label: "Python override", text: python },
    { label: "JSON override", text: json },
  ];
}

async function listRules(kinds: RuleKind[], signal: AbortSignal): Promise<Rule[]> {
  const pages = kinds.map(async (kind) => {
    const rules: Rule[] = [];
    let pageToken: string | undefined;
    do {
      const query = { kind, pageSize: 1000, pageToken };
      const page = await call<{ rules?: Rule[]; nextPageToken?: string }>("GET", "v1/rules", { query, signal });
      rules.push(...(page.rules ?? []));
      pageToken = page.nextPageToken;
    } while (pageToken);
    return rules;
  });
  return (await Promise.all(pages)).flat();
}

function matches(rule: Rule, words: string[]): boolean {
  const text = [
    rule.name,
    rule.formula,
    rule.description,
    rule.reference,
    ...(rule.aliases ?? []),
    ...(rule.opTypes ?? []),
  ]
    .join(" ")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

interface Section {
  title: string;
  purpose: string;
  rules: Rule[];
}

function sectionsOf(rules: Rule[]): Section[] {
  const own = rules.filter((rule) => rule.kind === "RULE_KIND_USER");
  const ops = rules.filter((rule) => rule.kind === "RULE_KIND_OP");
  const builtin = rules.filter((rule) => rule.kind === "RULE_KIND_BUILTIN");
  const families = [...new Set(builtin.map((rule) => rule.family ?? ""))].sort(byFamily);
  return [
    { title: "Own rules", purpose: "", rules: own },
    ...families.map((family) => ({
      title: FAMILIES[family] ?? family,
      purpose: PURPOSES[family] ?? "",
      rules: builtin.filter((rule) => (rule.family ?? "") === family),
    })),
    { title: "TensorFlow ops", purpose: "Gradients that TensorFlow registers", rules: ops },
  ].filter((section) => section.rules.length > 0);
}

function byFamily(a: string, b: string): number {
  const known = Object.keys(FAMILIES);
  const place = (name: string) => (known.includes(name) ? known.indexOf(name) : known.length);
  return place(a) - place(b) || a.localeCompare(b);
}

/** Moves the focus to the search box when somebody presses `/` outside a field. */
function useSearchKey(box: { current: HTMLInputElement | null }): void {
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
      if ((event.target as Element).closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      box.current?.focus();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, []);
}
