// Models in ONNX's format, which the server converts to graphs.

import { readFile } from "node:fs/promises";

/**
 * A model in ONNX's format, in one file, without external data. `evaluate`, `explain` and `compile` take it in place of a graph.
 * Names of tensors are the model's names of values; overrides name its operations and nodes. docs/reference/onnx.md lists the
 * operations that the server converts.
 */
export class OnnxModel {
  /** @param bytes The bytes of the file. The server reads them, and refuses wrong ones with INVALID_GRAPH. */
  constructor(readonly bytes: Uint8Array) {}
}

/** Reads a model from an `.onnx` file. */
export async function loadOnnx(path: string | URL): Promise<OnnxModel> {
  return new OnnxModel(await readFile(path));
}
