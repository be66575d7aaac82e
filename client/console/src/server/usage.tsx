import type { Usage } from "../api/types";

/** Shows how much of a limited resource is in use, as numbers and as a bar. */
export function UsageBar({
  usage,
  name,
  format = (value) => value.toLocaleString("en"),
}: {
  usage: Usage | undefined;
  name: string;
  format?: (value: number) => string;
}) {
  const used = Number(usage?.used ?? 0);
  const limit = Number(usage?.limit ?? 0);
  return (
    <span class="usage">
      <span class="number">
        {format(used)} {limit > 0 && <span class="muted">of {format(limit)}</span>}
      </span>
      {limit > 0 && (
        <meter min={0} max={limit} high={0.8 * limit} optimum={0} value={used} aria-label={`${name} in use`} />
      )}
    </span>
  );
}
