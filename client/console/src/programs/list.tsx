import { useState } from "preact/hooks";
import { call } from "../api/client";
import { useLoad } from "../api/load";
import type { Program } from "../api/types";
import { href } from "../router";
import { Empty, ErrorBox, Loading } from "../ui/states";
import { programId, timeText } from "./specs";

const PAGE_SIZE = 100;

interface ProgramsAnswer {
  programs?: Program[];
  nextPageToken?: string;
}

/** Page with all stored programs. */
export function ProgramList() {
  const [pages, setPages] = useState(1);
  const { answer, error, loading, reload } = useLoad((signal) => listPrograms(pages, signal), [pages]);
  return (
    <>
      <div class="page-head">
        <div>
          <h1>Programs</h1>
          <p class="muted">Graphs with overrides that the server checked, compiled and stored.</p>
        </div>
        <button class="button" type="button" onClick={reload} disabled={loading}>
          Reload
        </button>
      </div>
      {error !== undefined && <ErrorBox error={error} retry={reload} />}
      {!answer && error === undefined && <Loading what="the programs" lines={6} />}
      {answer && !answer.programs.length && (
        <Empty title="No stored programs">
          A program appears here when a client compiles one: <code>client.compile(graph, ys=…, xs=…)</code>.
        </Empty>
      )}
      {!!answer?.programs.length && (
        <div class="table-frame" tabIndex={0} role="region" aria-label="Programs">
          <table class="table">
            <thead>
              <tr>
                <th scope="col">Program</th>
                <th scope="col">ys</th>
                <th scope="col">xs</th>
                <th scope="col">Outputs</th>
                <th scope="col">Device</th>
                <th scope="col">Created</th>
              </tr>
            </thead>
            <tbody>
              {answer.programs.map((program) => (
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
            </tbody>
          </table>
        </div>
      )}
      {answer?.more && (
        <p class="row">
          <button class="button" type="button" disabled={loading} onClick={() => setPages(pages + 1)}>
            Show more
          </button>
        </p>
      )}
    </>
  );
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

async function listPrograms(pages: number, signal: AbortSignal): Promise<{ programs: Program[]; more: boolean }> {
  const programs: Program[] = [];
  let pageToken: string | undefined;
  for (let page = 0; page < pages; page++) {
    const query = { pageSize: PAGE_SIZE, pageToken };
    const answer = await call<ProgramsAnswer>("GET", "v1/programs", { query, signal });
    programs.push(...(answer.programs ?? []));
    pageToken = answer.nextPageToken;
    if (!pageToken) break;
  }
  return { programs, more: !!pageToken };
}
