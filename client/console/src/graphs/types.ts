import type { GraphData } from "./view/graph_data";

/** A number, or NaN and infinities as text; large integers as text; complex numbers as pairs; text. */
export type Element = number | string | boolean;
export type Nested = Element | Nested[];

export interface Tensor {
  dtype: string;
  shape: number[];
  values: Nested;
}

export interface Sparse {
  sparse: { values: Tensor; indices: Tensor; denseShape: Tensor };
}

/** A gradient of Evaluate's answer. */
export type Gradient = Tensor | Sparse | { unconnected: object } | { notDifferentiable: object };

export interface TensorSpec {
  name: string;
  dtype?: string;
  /** null: unknown rank; a null dimension is unknown. */
  shape?: (number | null)[] | null;
}

/** What the gateway tells about an uploaded graph. */
export interface GraphFacts {
  sha256: string;
  /** Format of the uploaded bytes, if they are no GraphDef. */
  format?: "GRAPH_FORMAT_ONNX";
  size: number;
  /** Number of all nodes. */
  nodeCount: number;
  /** Names of nodes: all, or the first of very many. */
  nodes: string[];
  ops: string[];
  /** Placeholders. */
  inputs: TensorSpec[];
  /** Nodes that no other node uses. */
  outputs: string[];
  /** The graph without the values of constants, in base64. */
  structure: string;
}

export interface Finding {
  reason?: string;
  message?: string;
  node?: string;
  field?: string;
}

export interface Resolution {
  node: string;
  opType?: string;
  rule?: string;
  label?: string;
  status?: string;
  qualifiedName?: string;
}

export interface Program {
  name?: string;
  digests?: { graph?: string };
  inputs?: TensorSpec[];
  outputs?: TensorSpec[];
  ys?: TensorSpec[];
  xs?: TensorSpec[];
  overrides?: Resolution[];
  defaultGradientNodes?: string[];
}

export interface CompileAnswer {
  program?: Program;
  findings?: Finding[];
}

export interface PictureAnswer {
  answer: CompileAnswer;
  picture: GraphData;
}

export interface EvaluateAnswer {
  outputs?: Record<string, Tensor>;
  gradients?: Record<string, Gradient>;
  device?: string;
}
