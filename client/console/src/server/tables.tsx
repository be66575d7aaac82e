import type { ComponentChildren } from "preact";
import { bytesText, durationText, seconds } from "../api/numbers";
import type { EngineStatus, ServerStatus } from "../api/types";
import { isNumber, Table } from "../ui/table";
import { UsageBar } from "./usage";

/** Table of the processes that run programs. */
export function Engines({ engines }: { engines: EngineStatus[] }) {
  return (
    <TableSection
      title="Engines"
      columns={[
        "Engine",
        "State",
        "Device",
        "#Running",
        "#Waiting",
        "#Programs",
        "#Memory",
        "#Up for",
        "#PID",
        "Ended",
        "Tenant",
      ]}
      rows={engines.map((engine) => [
        String(engine.index ?? 0),
        engine.ready ? <span class="tag tag-good">ready</span> : <span class="tag tag-warn">starting</span>,
        engine.device,
        engine.running ?? 0,
        engine.waiting ?? 0,
        engine.programs ?? 0,
        bytesText(Number(engine.residentBytes ?? 0)),
        durationText(seconds(engine.uptime)),
        engine.pid ?? "",
        Object.entries(engine.ended ?? {})
          .map(([reason, count]) => `${count} × ${reason}`)
          .join(", ") || "never",
        <>
          {engine.tenant} {engine.holdsSessions && <span class="tag">sessions</span>}
        </>,
      ])}
    />
  );
}

/** Table of the server's caches. */
export function Caches({ caches }: { caches: NonNullable<ServerStatus["caches"]> }) {
  return (
    <TableSection
      title="Caches"
      columns={["Cache", "Entries", "Memory"]}
      rows={caches.map((cache) => [
        cache.name === "loaded" ? "loaded in engines" : cache.name,
        <UsageBar usage={cache.entries} name={`${cache.name} entries`} />,
        <UsageBar usage={cache.sizeBytes} name={`${cache.name} memory`} format={bytesText} />,
      ])}
    />
  );
}

/** Table of the tenants with the most requests. */
export function Tenants({ status }: { status: ServerStatus }) {
  const tenants = status.tenants ?? [];
  return (
    <TableSection
      title="Tenants"
      note={
        (status.tenantCount ?? 0) > tenants.length
          ? `The ${tenants.length} tenants with the most requests, of ${status.tenantCount}.`
          : undefined
      }
      columns={[
        "Tenant",
        "Requests",
        "Programs",
        "Rules",
        "Sessions",
        "Session memory",
        "Handles",
        "Handle memory",
        "Blobs",
      ]}
      rows={tenants.map((tenant) => [
        tenant.name,
        ...(
          ["requests", "programs", "rules", "sessions", "sessionBytes", "handles", "handleBytes", "blobBytes"] as const
        ).map((name) => (
          <UsageBar
            usage={tenant[name]}
            name={`${tenant.name} ${name}`}
            {...(name.endsWith("Bytes") ? { format: bytesText } : {})}
          />
        )),
      ])}
    />
  );
}

/** List of the programs that the server refuses for some time, because they ended engines. */
export function Quarantine({ status }: { status: ServerStatus }) {
  const programs = status.quarantinedPrograms ?? [];
  return (
    <TableSection
      title="Quarantined programs"
      note={
        programs.length
          ? `They ended engines, so the server refuses them for some time.${(status.quarantinedProgramCount ?? 0) > programs.length ? ` ${programs.length} of ${status.quarantinedProgramCount} are shown.` : ""}`
          : "None. The server refuses a program for some time after it ended an engine."
      }
      columns={["Program digest", "Reason", "#Refused for"]}
      rows={programs.map((program) => [
        <code>{program.digest}</code>,
        program.reason,
        durationText(seconds(program.remaining)),
      ])}
    />
  );
}

/** Table with a title. A column whose name starts with `#` holds numbers. The first cell of a row names it. */
function TableSection({
  title,
  note,
  columns,
  rows,
}: {
  title: string;
  note?: string | undefined;
  columns: string[];
  rows: ComponentChildren[][];
}) {
  const look = (index: number) => (isNumber(columns[index]!) ? "number" : undefined);
  return (
    <section class="stack" aria-label={title}>
      <div>
        <h2>{title}</h2>
        {note && <p class="small muted">{note}</p>}
      </div>
      {rows.length > 0 && (
        <Table label={`Table of ${title.toLowerCase()}`} columns={columns}>
          {rows.map((row) => (
            <tr>
              {row.map((cell, index) =>
                index === 0 ? <th scope="row">{cell}</th> : <td class={look(index)}>{cell}</td>,
              )}
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}
