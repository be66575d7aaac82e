import type { GraphFacts } from "./types";

export const SELECTORS = {
  opType: "Op type",
  node: "Node name (glob)",
  nodeRegex: "Node name (regex)",
  scope: "Scope",
  layer: "Layer",
} as const;

/** A row of the table of overrides, as typed. */
export interface OverrideRow {
  kind: keyof typeof SELECTORS;
  value: string;
  rule: string;
  /** `name=value`, separated by commas. */
  params: string;
}

/** A rule that is compared, with its params, as typed. */
export interface ComparedRule {
  rule: string;
  params: string;
}

/** What to compute, as typed: names separated by commas. */
export interface SpecForm {
  ys: string;
  xs: string;
  fetches: string;
  overrides: OverrideRow[];
}

/** Splits names that are separated by commas or white space. */
export function names(text: string): string[] {
  return text.split(/[\s,]+/).filter(Boolean);
}

/** Returns params from `clip=1, alpha=2`. Throws an Error that tells what is wrong. */
export function parseParams(text: string): Record<string, number> {
  const found: Record<string, number> = {};
  for (const part of text.split(/[,;\n]+/).filter((each) => each.trim())) {
    const [name = "", value = "", ...more] = part.split("=").map((each) => each.trim());
    if (!name || !value || more.length || !Number.isFinite(Number(value))) {
      throw new Error(`“${part.trim()}” is not a param: write name=number, for example clip=1.`);
    }
    found[name] = Number(value);
  }
  return found;
}

/** Returns the rows that are complete, without space around them; rows without a value or a rule are still being typed. */
export function completeRows(rows: OverrideRow[]): OverrideRow[] {
  return rows
    .map((row) => ({ ...row, value: row.value.trim(), rule: row.rule.trim() }))
    .filter(({ value, rule }) => value && rule);
}

/** Returns ProgramSpec in the gateway's JSON. Throws an Error for params that cannot be read. */
export function programSpec(
  { sha256, format }: Pick<GraphFacts, "sha256" | "format">,
  form: SpecForm,
): Record<string, unknown> {
  const ys = names(form.ys);
  const overrides = completeRows(form.overrides).map(({ kind, value, rule, params }) => ({
    selector: { [kind]: value },
    rule,
    params: parseParams(params),
  }));
  return {
    graph: { blobSha256: sha256, ...(format ? { format } : {}) },
    fetches: names(form.fetches),
    ...(ys.length ? { vjp: { ys, xs: names(form.xs) }, overrides } : {}),
  };
}

/** Returns a form to start with: gradients of the last output with respect to floating-point inputs; none without those. */
export function initialForm(facts: GraphFacts): SpecForm {
  const floats = facts.inputs.filter(({ dtype }) => /^(float|bfloat|half|double|complex)/.test(dtype ?? ""));
  const last = facts.outputs.at(-1) ?? "";
  return { ys: floats.length ? last : "", xs: floats.map(({ name }) => name).join(", "), fetches: last, overrides: [] };
}

/** Returns one form per column of a comparison: these overrides, the same with another rule, and none. */
export interface Column {
  title: string;
  form: SpecForm;
}

/**
 * Returns the columns of a comparison.
 *
 * @param rules Rules to put in the place of the first rule of the form.
 * @param plain Whether to add a column without overrides.
 */
export function columns(form: SpecForm, compared: ComparedRule[], plain: boolean): Column[] {
  const rows = completeRows(form.overrides);
  const first = rows[0];
  const wanted = compared.map(({ rule, params }) => ({ rule: rule.trim(), params: params.trim() }));
  const orphan = wanted.find(({ rule, params }) => params && !rule);
  if (orphan) throw new Error(`Choose the rule to compare that has the params “${orphan.params}”.`);
  const rules = wanted.filter(({ rule }) => rule);
  if (rules.length && !first) {
    throw new Error(`Add an override: “${rules[0]!.rule}” is compared in the place of the first override's rule.`);
  }
  const title = first ? [...new Set(rows.map(titleOf))].join(", ") : "no overrides";
  const found: Column[] = [{ title, form }];
  for (const other of rules) {
    // A param of one rule is not one of another.
    const changed = rows.map((row) => (row.rule === first!.rule ? { ...row, ...other } : row));
    found.push({ title: titleOf(other), form: { ...form, overrides: changed } });
  }
  if (plain && first) found.push({ title: "no overrides", form: { ...form, overrides: [] } });
  return found;
}

function titleOf({ rule, params }: ComparedRule): string {
  return params.trim() ? `${rule} (${params.trim()})` : rule;
}
