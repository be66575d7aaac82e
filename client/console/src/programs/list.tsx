import { useState } from "preact/hooks";
import { call } from "../api/client";
import { useList, type Listed, type ListPage } from "../api/pages";
import type { Program } from "../api/types";
import { go, href, type Route } from "../router";
import { Empty, ErrorBox, Loading } from "../ui/states";
import { Table } from "../ui/table";
import { programId, timeText } from "./specs";

/** Rows that are shown at first, and that each click adds. */
const SHOWN = 100;

interface ProgramsAnswer {
  programs?: Program[];
  nextPageToken?: string;
}

/** Page with all stored programs. */
export function ProgramList({ route }: { route: Route }) {
  const search = route.query.get("search") ?? "";
  const [shown, setShown] = useState(SHOWN);
  // The server does not search: a search reads all programs.
  const list = useList(
    (token, signal) => listPrograms(search ? 1000 : SHOWN, token, signal),
    search ? Infinity : shown,
  );
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = list.items.filter((program) => matches(program, words));
  const isEmpty = list.isComplete && !found.length;
  return (
    <>
      <div class="page-head">
        <div>
          <h1>Programs</h1>
          <p class="muted">Graphs with overrides that the server checked, compiled and stored.</p>
        </div>
        <button class="button" type="button" onClick={list.reload} disabled={list.loading}>
          Reload
        </button>
      </div>
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="field filters-search">
          <span>Search</span>
          <input
            class="input"
            type="search"
            placeholder="Program, tensor or device"
            value={search}
            onInput={(event) => {
              const text = event.currentTarget.value;
              setShown(SHOWN);
              go(`#/programs${text ? `?${new URLSearchParams({ search: text })}` : ""}`, { replace: true });
            }}
          />
        </label>
        <p class="filters-count small muted number" role="status">
          {countText(found.length, list, !!search)}
        </p>
      </form>
      {list.error !== undefined && <ErrorBox error={list.error} retry={list.retry} />}
      {list.loading && !list.items.length && <Loading what="the programs" lines={6} />}
      {isEmpty && !list.items.length && (
        <Empty title="No stored programs">
          A program appears here when a client compiles one: <code>client.compile(graph, ys=…, xs=…)</code>.
        </Empty>
      )}
      {isEmpty && list.items.length > 0 && <Empty title="No program matches">Search for another word.</Empty>}
      {found.length > 0 && (
        <Table label="Programs" columns={["Program", "ys", "xs", "Outputs", "Device", "Created"]}>
          {found.slice(0, shown).map((program) => (
            <tr key={program.name}>
              <th scope="row">
                <a href={href("programs", programId(program))}>
                  <code>{programId(program)}</code>
                </a>
              </th>
              <td>{names(program.ys)}</td>
              <td>{names(program.xs)}</td>
              <td>{names(program.outputs)}</td>
              <td class="nowrap">{program.device}</td>
              <td class="nowrap">{timeText(program.createTime)}</td>
            </tr>
          ))}
        </Table>
      )}
      {(found.length > shown || (!search && found.length > 0 && !list.isComplete)) && (
        <p class="row">
          <button class="button" type="button" disabled={list.loading} onClick={() => setShown(shown + SHOWN)}>
            Show more
          </button>
        </p>
      )}
    </>
  );
}

function countText(found: number, { items, isComplete, loading }: Listed<Program>, isSearch: boolean): string {
  const all = items.length.toLocaleString("en");
  if (items.length === 1 && isComplete && !isSearch) return "1 program";
  if (isSearch) return `${found.toLocaleString("en")} of ${all} programs${loading ? "…" : ""}`;
  return items.length ? `${all} programs${isComplete ? "" : ", and more"}` : loading ? "…" : "";
}

function matches(program: Program, words: string[]): boolean {
  const specs = [program.inputs, program.outputs, program.ys, program.xs].flatMap((list) => list ?? []);
  const text = [
    programId(program),
    program.device,
    ...Object.keys(program.aliases ?? {}),
    ...specs.map(({ name }) => name),
  ]
    .join(" ")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

function names(specs: { name?: string }[] = []) {
  const shown = specs.slice(0, 3).map((spec) => spec.name);
  return (
    <code>
      {shown.join(", ")}
      {specs.length > 3 && `, … (${specs.length})`}
    </code>
  );
}

async function listPrograms(
  pageSize: number,
  pageToken: string | undefined,
  signal: AbortSignal,
): Promise<ListPage<Program>> {
  const answer = await call<ProgramsAnswer>("GET", "v1/programs", { query: { pageSize, pageToken }, signal });
  return { items: answer.programs ?? [], nextPageToken: answer.nextPageToken };
}
