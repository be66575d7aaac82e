// Reads the server's answers.

import type { Duration } from "@bufbuild/protobuf/wkt";

import { createError } from "./errors.js";
import type { EvaluateResponse, Gradient as GradientMessage } from "./gen/gradrule/v1/evaluate_pb.js";
import { ResolutionStatus } from "./gen/gradrule/v1/override_pb.js";
import type { Resolution as ResolutionMessage } from "./gen/gradrule/v1/override_pb.js";
import type { NamedTensor } from "./gen/gradrule/v1/tensor_pb.js";
import type { Tensor } from "./tensor.js";
import { Sparse, readNamedTensor, readSparse, readTensor } from "./wire.js";

/** The rule of one node, and whether it is used. */
export interface Resolution {
  /** Name of the node; inner nodes as `call/inner`. */
  readonly node: string;
  readonly opType: string;
  /** Name of the rule; `default`; or `inline`. With the label `no_gradient`: what `noGradient` did. */
  readonly rule: string;
  readonly label: string;
  readonly status: "active" | "off_path" | "not_differentiable";
  /** Name of the graph's function that contains the node; empty at the top level. */
  readonly function: string;
  /** All nodes of a pattern or a region; empty for a single node. */
  readonly nodes: readonly string[];
  /**
   * Name with the branch behind each loop and conditional: `cond[then]/inner`. As the `node` of an override it selects this
   * node alone. Equal to `node` outside of loops and branches.
   */
  readonly qualifiedName: string;
}

/** SHA-256 (hexadecimal) of the graph's bytes, and of the whole program. */
export interface Digests {
  readonly graph: string;
  readonly program: string;
}

/** The gradient with respect to one x: a tensor, slices of a tensor, or null if there is none. */
export type Gradient = Tensor | Sparse | null;

/** Form of a gradient; the last two are the reasons why it is null. */
export type GradientKind = "dense" | "sparse" | "unconnected" | "not_differentiable";

/** Result of one evaluation, by the requested names. */
export interface Evaluation {
  readonly outputs: Readonly<Record<string, Tensor>>;
  readonly gradients: Readonly<Record<string, Gradient>>;
  readonly gradientKinds: Readonly<Record<string, GradientKind>>;
  /** Rule of each overridden node; empty for a program, see `Program.overrides`. */
  readonly overrides: readonly Resolution[];
  /** Nodes on the path from xs to ys that no override matched; empty for a program. */
  readonly defaultGradientNodes: readonly string[];
  /** Durations of waiting, compiling and running, in seconds. */
  readonly timings: { readonly queue: number; readonly compile: number; readonly run: number };
  /** Device that ran the program, for example `CPU:0`. */
  readonly device: string;
  readonly digests: Digests;
  /** Nodes that rewrites replaced; empty for a program. */
  readonly rewritten: readonly string[];
  /** Hints that the request may not compute what is wanted; empty for a program, see `Program.notes`. */
  readonly notes: readonly string[];
  /** True if XLA computed the result. */
  readonly jit: boolean;
  /**
   * Number of examples (rows of axis 0) of all calls that ran together, including this one; 0 if this call ran alone.
   */
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

export function readResolution(message: ResolutionMessage): Resolution {
  const { node, opType, rule, label, function: within, nodes } = message;
  if (message.status === ResolutionStatus.UNSPECIFIED) throw unreadable(`override of ${node}`);
  const qualifiedName = message.qualifiedName || node;
  return { node, opType, rule, label, status: STATUSES[message.status], function: within, nodes, qualifiedName };
}

export function readEvaluation(message: EvaluateResponse): Evaluation {
  const gradients = message.gradients.map((gradient) => [gradient.x, readGradient(gradient)] as const);
  const { queue, compile, run } = message.timings ?? {};
  return {
    outputs: Object.fromEntries(message.outputs.map((output) => [output.name, readOutput(output)])),
    gradients: Object.fromEntries(gradients.map(([x, { value }]) => [x, value])),
    gradientKinds: Object.fromEntries(gradients.map(([x, { kind }]) => [x, kind])),
    overrides: message.overrides.map(readResolution),
    defaultGradientNodes: message.defaultGradientNodes,
    timings: { queue: seconds(queue), compile: seconds(compile), run: seconds(run) },
    device: message.device,
    digests: readDigests(message.digests),
    rewritten: message.rewritten,
    notes: message.notes,
    jit: message.jit,
    batchSize: Number(message.batchSize),
  };
}

export function readDigests(message: Digests | undefined): Digests {
  return { graph: message?.graph ?? "", program: message?.program ?? "" };
}

function readOutput(message: NamedTensor): Tensor {
  const value = readNamedTensor(message);
  if (value === null) throw unreadable(`output ${message.name}`);
  return value;
}

function readGradient({ x, value }: GradientMessage): { kind: GradientKind; value: Gradient } {
  // The server writes gradients to shared memory only for clients that share some.
  if (value.case === undefined || value.case === "sharedMemory") throw unreadable(`gradient of ${x}`);
  const kind = KINDS[value.case];
  if (value.case === "dense") return { kind, value: readTensor(value.value) };
  if (value.case === "sparse") return { kind, value: readSparse(value.value) };
  return { kind, value: null };
}

function seconds(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) + duration.nanos / 1e9 : 0;
}

/** Returns the error for a field in a form that this client does not know, because the server is newer. */
function unreadable(what: string): Error {
  return createError("UNSUPPORTED", `The server sent the ${what} in a form that this client does not know.`);
}
