import { useState } from "preact/hooks";
import { ApiError } from "../api/client";
import { durationText, seconds } from "../api/numbers";
import { callRecords, quantile, type CallRecord } from "../api/timing";
import type { ServerStatus } from "../api/types";
import type { Route } from "../router";
import { Plot } from "../ui/plot";
import { Empty, ErrorBox, Loading } from "../ui/states";
import { Table } from "../ui/table";
import { useStatus, type Sample } from "./polling";
import { Caches, Engines, Quarantine, Tenants } from "./tables";
import { UsageBar } from "./usage";

/** Page of the server's state, live. */
export function ServerPage(_props: { route: Route }) {
  const [paused, setPaused] = useState(false);
  const [attempt, setAttempt] = useState(0);
  const { status, error, history } = useStatus(paused, attempt);
  const retry = () => setAttempt(attempt + 1);
  return (
    <>
      <div class="page-head">
        <div>
          <h1>Server</h1>
          <p class="muted">
            {status
              ? `gradrule ${status.version ?? ""}, TensorFlow ${status.tensorflowVersion ?? "not ready"}, up for ${durationText(seconds(status.uptime))}`
              : "State of the server, every 2 seconds."}
          </p>
        </div>
        {status && (
          <button class="button" type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>
            {paused ? "Resume" : "Pause"}
          </button>
        )}
      </div>
      {error !== undefined && <StatusError error={error} retry={retry} />}
      {status ? (
        <Details status={status} history={history} isOld={error !== undefined} />
      ) : (
        error === undefined && <Loading what="the state of the server" lines={9} />
      )}
      <Latencies records={callRecords()} />
    </>
  );
}

function StatusError({ error, retry }: { error: unknown; retry: () => void }) {
  if (error instanceof ApiError && error.problem.code === "UNIMPLEMENTED") {
    return (
      <Empty title="The server does not tell its state">
        Its operator turned AdminService off (--no-admin). Rules and programs work as usual.
      </Empty>
    );
  }
  return <ErrorBox error={error} retry={retry} />;
}

function Details({ status, history, isOld }: { status: ServerStatus; history: Sample[]; isOld: boolean }) {
  const last = history.at(-1)!;
  const workers = status.compileWorkers ?? {};
  const x = history.map((sample) => Number((sample.at - last.at).toFixed(1)));
  const line = (name: "running" | "waiting" | "roundTrip") => history.map((sample) => sample[name]);
  return (
    <div class={isOld ? "status status-old" : "status"}>
      {isOld && <p>This was the state at {last.answered.toLocaleTimeString()}.</p>}
      <dl class="tiles">
        <Tile name="State">
          {isOld ? (
            <span class="tag">unknown</span>
          ) : status.ready ? (
            <span class="tag tag-good">ready</span>
          ) : (
            <span class="tag tag-bad">no engine is ready</span>
          )}
        </Tile>
        <Tile name="Requests">
          <UsageBar usage={status.requests} name="requests" />
        </Tile>
        <Tile name="Waiting for an engine">{last.waiting}</Tile>
        <Tile name="Spare engines">{status.spareEngines ?? 0}</Tile>
        <Tile name="Compile workers">
          {workers.count ? `${workers.busy ?? 0} of ${workers.count} busy` : "none running"}
          {workers.waiting ? `, ${workers.waiting} waiting` : ""}
        </Tile>
        {status.registry && (
          <Tile name="Database of rules">
            {status.registry.problem ? (
              <span class="tag tag-bad" title={status.registry.problem}>
                unavailable for {durationText(seconds(status.registry.unavailableFor))}
              </span>
            ) : (
              <span class="tag tag-good" title={status.registry.database}>
                available
              </span>
            )}
          </Tile>
        )}
        <Tile name="Round trip">{last.roundTrip.toFixed(1)} ms</Tile>
      </dl>
      <Quarantine status={status} />
      <div class="charts">
        <section class="card stack" aria-labelledby="queue-title">
          <h2 id="queue-title">Queue</h2>
          <Plot
            x={x}
            axis="seconds"
            live
            label="Requests that run and wait"
            height={180}
            lines={[
              { label: "running in engines", values: line("running"), colour: "--curve-1" },
              { label: "waiting for an engine", values: line("waiting"), colour: "--curve-2", dash: [6, 4] },
            ]}
          />
        </section>
        <section class="card stack" aria-labelledby="trip-title">
          <h2 id="trip-title">Round trip of the status call</h2>
          <Plot
            x={x}
            axis="seconds"
            live
            label="Round trip of the status call"
            height={180}
            lines={[{ label: "milliseconds", values: line("roundTrip"), colour: "--curve-3" }]}
          />
        </section>
      </div>
      <Engines engines={status.engines ?? []} />
      <div class="charts">
        <Caches caches={status.caches ?? []} />
      </div>
      <Tenants status={status} />
    </div>
  );
}

function Tile({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div class="card tile">
      <dt class="small muted">{name}</dt>
      <dd class="number">{children}</dd>
    </div>
  );
}

function Latencies({ records }: { records: CallRecord[] }) {
  const milliseconds = (values: number[], share: number) => {
    const found = quantile(values, share);
    return found === undefined ? "" : found.toFixed(1);
  };
  if (!records.length) return null;
  return (
    <section class="stack" aria-labelledby="latency-title">
      <div>
        <h2 id="latency-title">Latency of this tab’s calls</h2>
        <p class="small muted">
          Milliseconds, over the last 200 calls of each kind. Queue and run are what the server measured; only
          evaluations tell it.
        </p>
      </div>
      <Table label="Table of latencies" columns={["Call", "#Calls", "#Errors", "#Median", "#95 %", "#Queue", "#Run"]}>
        {records.map((record) => (
          <tr key={record.operation}>
            <th scope="row">
              <code>{record.operation}</code>
            </th>
            <td class="number">{record.count}</td>
            <td class="number">{record.errors}</td>
            <td class="number">{milliseconds(record.roundTrips, 0.5)}</td>
            <td class="number">{milliseconds(record.roundTrips, 0.95)}</td>
            <td class="number">{milliseconds(record.queue, 0.5)}</td>
            <td class="number">{milliseconds(record.run, 0.5)}</td>
          </tr>
        ))}
      </Table>
    </section>
  );
}
