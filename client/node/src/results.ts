// What the server answers, as the caller reads it.

import type { Duration } from "@bufbuild/protobuf/wkt";

import { errorOf } from "./errors.js";
import type { EvaluateResponse, Gradient as GradientMessage } from "./gen/gradrule/v1/evaluate_pb.js";
import { ResolutionStatus } from "./gen/gradrule/v1/override_pb.js";
import type { Resolution as ResolutionMessage } from "./gen/gradrule/v1/override_pb.js";
import type { NamedTensor } from "./gen/gradrule/v1/tensor_pb.js";
import type { Tensor } from "./tensor.js";
import { Sparse, namedTensorOf, sparseOf, tensorOf } from "./wire.js";

/** Which rule a node got, and whether it is used. */
export interface Resolution {
  /** The node, nested ones as `call/inner`. */
  readonly node: string;
  readonly opType: string;
  /** Name of the rule, `default`, or `inline`; with label `no_gradient`: what `noGradient` did. */
  readonly rule: string;
  readonly label: string;
  readonly status: "active" | "off_path" | "not_differentiable";
  /** Function of the graph that the node lies in; empty at top level. */
  readonly function: string;
  /** All nodes of a pattern or a region; empty for a single node. */
  readonly nodes: readonly string[];
}

/** SHA-256 (hex) of the graph's bytes, and of all that the program is made of. */
export interface Digests {
  readonly graph: string;
  readonly program: string;
}

/** The gradient for one x: a tensor, slices of one, or null where there is none. */
export type Gradient = Tensor | Sparse | null;

/** Which form a gradient has; the last two say why it is null. */
export type GradientKind = "dense" | "sparse" | "unconnected" | "not_differentiable";

/** The answer to one evaluation, by the names that were asked for. */
export interface Evaluation {
  readonly outputs: Readonly<Record<string, Tensor>>;
  readonly gradients: Readonly<Record<string, Gradient>>;
  readonly gradientKinds: Readonly<Record<string, GradientKind>>;
  /** Which node got which rule; empty for a program, which tells it itself. */
  readonly overrides: readonly Resolution[];
  /** Nodes on the path that no override took; empty for a program. */
  readonly defaultGradientNodes: readonly string[];
  /** Seconds spent waiting, compiling and running. */
  readonly timings: { readonly queue: number; readonly compile: number; readonly run: number };
  /** Where it ran, `CPU:0` for example. */
  readonly device: string;
  readonly digests: Digests;
  /** Nodes that rewrites replaced; empty for a program. */
  readonly rewritten: readonly string[];
  /** XLA computed it. */
  readonly jit: boolean;
  /** Examples (rows of axis 0) of all calls that ran together with this one, its own included; 0: it ran alone. */
  readonly batchSize: number;
}

const STATUSES = {
  [ResolutionStatus.ACTIVE]: "active",
  [ResolutionStatus.OFF_PATH]: "off_path",
  [ResolutionStatus.NOT_DIFFERENTIABLE]: "not_differentiable",
} as const;

const KINDS = {
  dense: "dense",
  sparse: "sparse",
  unconnected: "unconnected",
  notDifferentiable: "not_differentiable",
} as const;

export function resolutionOf(message: ResolutionMessage): Resolution {
  const { node, opType, rule, label, function: within, nodes } = message;
  if (message.status === ResolutionStatus.UNSPECIFIED) throw unreadable(`override of ${node}`);
  return { node, opType, rule, label, status: STATUSES[message.status], function: within, nodes };
}

export function evaluationOf(message: EvaluateResponse): Evaluation {
  const gradients = message.gradients.map((gradient) => [gradient.x, gradientOf(gradient)] as const);
  const { queue, compile, run } = message.timings ?? {};
  return {
    outputs: Object.fromEntries(message.outputs.map((output) => [output.name, outputOf(output)])),
    gradients: Object.fromEntries(gradients.map(([x, { value }]) => [x, value])),
    gradientKinds: Object.fromEntries(gradients.map(([x, { kind }]) => [x, kind])),
    overrides: message.overrides.map(resolutionOf),
    defaultGradientNodes: message.defaultGradientNodes,
    timings: { queue: seconds(queue), compile: seconds(compile), run: seconds(run) },
    device: message.device,
    digests: digestsOf(message.digests),
    rewritten: message.rewritten,
    jit: message.jit,
    batchSize: Number(message.batchSize),
  };
}

export function digestsOf(message: Digests | undefined): Digests {
  return { graph: message?.graph ?? "", program: message?.program ?? "" };
}

function outputOf(message: NamedTensor): Tensor {
  const value = namedTensorOf(message);
  if (value === null) throw unreadable(`output ${message.name}`);
  return value;
}

function gradientOf({ x, value }: GradientMessage): { kind: GradientKind; value: Gradient } {
  // The server writes gradients to shared memory only for clients that share some.
  if (value.case === undefined || value.case === "sharedMemory") throw unreadable(`gradient of ${x}`);
  const kind = KINDS[value.case];
  if (value.case === "dense") return { kind, value: tensorOf(value.value) };
  if (value.case === "sparse") return { kind, value: sparseOf(value.value) };
  return { kind, value: null };
}

function seconds(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) + duration.nanos / 1e9 : 0;
}

/** A field of a kind that this client does not know: the server is newer. */
function unreadable(what: string): Error {
  return errorOf("UNSUPPORTED", `The server sent the ${what} in a form that this client does not know.`);
}
