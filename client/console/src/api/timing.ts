import { seconds } from "./numbers";

/** Calls of one kind that this tab made since it was opened. */
export interface CallRecord {
  /** Method and path, with `{name}` instead of names. */
  operation: string;
  count: number;
  errors: number;
  /** Durations of the last calls, from the browser and back, in milliseconds. */
  roundTrips: number[];
  /** What the server itself measured in the last answers that tell it (`timings` of evaluate), in milliseconds. */
  queue: number[];
  run: number[];
}

const KEPT = 200;
const records = new Map<string, CallRecord>();

/** Adds a finished call. */
export function recordCall(method: string, path: string, milliseconds: number, ok: boolean, answer: unknown): void {
  const operation = `${method} /${path.replace(/^(v1\/\w+\/)[^:]+$/, "$1{name}")}`;
  const found = records.get(operation) ?? { operation, count: 0, errors: 0, roundTrips: [], queue: [], run: [] };
  records.set(operation, found);
  found.count += 1;
  if (!ok) found.errors += 1;
  keep(found.roundTrips, milliseconds);
  const timings = (answer as { timings?: { queue?: string; run?: string } } | undefined)?.timings;
  if (timings) {
    keep(found.queue, 1000 * seconds(timings.queue));
    keep(found.run, 1000 * seconds(timings.run));
  }
}

/** Returns the records of all operations, by name. */
export function callRecords(): CallRecord[] {
  return [...records.values()].sort((a, b) => a.operation.localeCompare(b.operation));
}

/** Returns the value below which the given share of the values lies; undefined without values. */
export function quantile(values: readonly number[], share: number): number | undefined {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function keep(values: number[], value: number): void {
  values.push(value);
  if (values.length > KEPT) values.shift();
}
