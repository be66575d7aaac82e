/** A number in JSON: NaN and infinities are strings. */
export type JsonNumber = number | "NaN" | "Infinity" | "-Infinity";

/** Converts a number to JSON. */
export function encodeNumber(value: number): JsonNumber {
  return Number.isFinite(value) ? value : (String(value) as JsonNumber);
}

/** Converts a number, or an integer that is a string, from JSON; a field that is not set is 0. */
export function decodeNumber(value: JsonNumber | string | undefined): number {
  return value === undefined ? 0 : Number(value);
}

/** Converts a duration such as `1.5s` to seconds; a duration that is not set is 0. */
export function seconds(duration: string | undefined): number {
  return duration ? Number.parseFloat(duration) : 0;
}

/** Formats a number for people: integers below 10 million in full, others with at most `digits` significant digits. */
export function numberText(value: number, digits = 5): string {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "−inf";
  const size = Math.abs(value);
  const inFull = Number.isInteger(value) ? value : Number(value.toPrecision(digits));
  const text = size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(2) : String(inFull);
  return text.replace("-", "−");
}

/** Formats a size in bytes. */
export function bytesText(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

/** Formats a time span in seconds: `3 h 12 min`. */
export function durationText(span: number): string {
  if (span < 60) return `${Math.round(span)} s`;
  if (span < 3600) return `${Math.floor(span / 60)} min ${Math.round(span % 60)} s`;
  if (span < 86400) return `${Math.floor(span / 3600)} h ${Math.floor((span % 3600) / 60)} min`;
  return `${Math.floor(span / 86400)} d ${Math.floor((span % 86400) / 3600)} h`;
}
