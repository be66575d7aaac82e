import type { Program, TensorSpec } from "../api/types";

/** Returns a program's name without its collection. */
export function programId(program: Program): string {
  return program.name.replace(/^programs\//, "");
}

/** Formats a shape: `[?, 3]`, `any shape`. */
export function shapeText(shape: TensorSpec["shape"]): string {
  if (!shape) return "any shape";
  return `[${shape.map((size) => size ?? "?").join(", ")}]`;
}

/** Formats an element type: `float32`. */
export function dtypeText(dtype: string | undefined): string {
  return dtype ?? "any type";
}

/** Formats a point in time in the language of the browser. */
export function timeText(time: string | undefined): string {
  return time ? new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "";
}
