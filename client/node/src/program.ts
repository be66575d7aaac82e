// Compiled programs: calls send only tensors.

import { timestampDate } from "@bufbuild/protobuf/wkt";

import { CALL_OPTIONS } from "./channel.js";
import type { CallOptions, Channel, TransferOptions } from "./channel.js";
import { createError, reasonName } from "./errors.js";
import type { Detail } from "./errors.js";
import { ProgramService } from "./gen/gradrule/v1/program_pb.js";
import type { CompileProgramResponse, Program as ProgramMessage } from "./gen/gradrule/v1/program_pb.js";
import { withoutOutputZero } from "./names.js";
import { readDigests, readEvaluation, readResolution } from "./results.js";
import type { Digests, Evaluation, Resolution } from "./results.js";
import { callParams, feedMessages, namedTensors, splitGradYs } from "./spec.js";
import type { CallParams, DTypeOf, Feeds, GradYs } from "./spec.js";
import { checkOptions } from "./values.js";
import type { OptionNames } from "./values.js";
import { readSpecs } from "./wire.js";
import type { TensorSpec } from "./wire.js";

/** Options of one call of a program. */
export interface ProgramCallOptions extends CallOptions, TransferOptions {
  /** Param values by the label of an override. The program is not compiled again. */
  readonly params?: CallParams;
  /** Upstream gradients: values by y, or in the order of ys. */
  readonly gradYs?: GradYs;
}

export const PROGRAM_CALL_OPTIONS = {
  ...CALL_OPTIONS,
  transfer: true,
  params: true,
  gradYs: true,
} as const satisfies OptionNames<ProgramCallOptions>;

/** Tensors and rules of a program. */
class Signature {
  /** Placeholders that calls feed. */
  readonly inputs: Readonly<Record<string, TensorSpec>>;
  /** Tensors that calls return. */
  readonly outputs: Readonly<Record<string, TensorSpec>>;
  /** Tensors that are differentiated. */
  readonly ys: Readonly<Record<string, TensorSpec>>;
  /** Tensors to differentiate with respect to. */
  readonly xs: Readonly<Record<string, TensorSpec>>;
  /** Rule of each overridden node. */
  readonly overrides: readonly Resolution[];
  /** Nodes on the path from xs to ys that no override matched. */
  readonly defaultGradientNodes: readonly string[];
  /** Nodes that rewrites replaced. */
  readonly rewritten: readonly string[];
  /** Hints that the program may not compute what is wanted. */
  readonly notes: readonly string[];
  /** Names of the xs whose gradients are sparse in results. */
  readonly sparseGradients: readonly string[];

  constructor(message: ProgramMessage | undefined) {
    this.inputs = readSpecs(message?.inputs ?? []);
    this.outputs = readSpecs(message?.outputs ?? []);
    this.ys = readSpecs(message?.ys ?? []);
    this.xs = readSpecs(message?.xs ?? []);
    this.overrides = (message?.overrides ?? []).map(readResolution);
    this.defaultGradientNodes = message?.defaultGradientNodes ?? [];
    this.rewritten = message?.rewritten ?? [];
    this.notes = message?.notes ?? [];
    this.sparseGradients = message?.sparseGradients ?? [];
  }
}

/** What `compile` would create. `findings` lists all errors; if there are any, everything else is empty. */
export class Explanation extends Signature {
  constructor(
    message: ProgramMessage | undefined,
    readonly findings: readonly Detail[],
  ) {
    super(message);
  }

  /** Throws the error that `evaluate` or `compile` would reject with, if any. */
  throwFindings(): void {
    const [first] = this.findings;
    if (first) throw createError(first.reason, first.message, { details: this.findings });
  }
}

/** Reads the answer of CompileProgram with validate_only. */
export function readExplanation({ program, findings }: CompileProgramResponse): Explanation {
  return new Explanation(
    program,
    findings.map(({ reason, message, node, field }) => ({ reason: reasonName(reason), message, node, field })),
  );
}

/** A compiled program and the connection to its server. */
export class Program extends Signature {
  /** `programs/{id}`. */
  readonly name: string;
  readonly digests: Digests;
  /** Device that runs the program, for example `CPU:0`. */
  readonly device: string;
  readonly createTime: Date | null;
  readonly #channel: Channel;
  // In the requested order, which the keys of an object may not keep.
  readonly #ys: readonly string[];

  constructor(channel: Channel, message: ProgramMessage) {
    super(message);
    this.name = message.name;
    this.digests = readDigests(message.digests);
    this.device = message.device;
    this.createTime = message.createTime ? timestampDate(message.createTime) : null;
    this.#channel = channel;
    this.#ys = message.ys.map(({ name }) => name);
  }

  /**
   * Runs the program once. Rejects with MISSING_FEED, UNKNOWN_FEED, FEED_DTYPE, FEED_SHAPE, EXECUTION_FAILED and
   * others.
   */
  async evaluate(feeds: Feeds = {}, options: ProgramCallOptions = {}): Promise<Evaluation> {
    checkOptions(options, PROGRAM_CALL_OPTIONS, "evaluate");
    const { inGraph, values } = splitGradYs(options.gradYs, this.#ys);
    const [named] = inGraph;
    if (named) {
      throw createError(
        "INVALID_DERIVATIVE",
        `gradYs names the tensor ${named[1]}; tensors of the graph are chosen in compile(), a call gives values.`,
      );
    }
    const request = {
      target: { case: "program" as const, value: this.name },
      feeds: feedMessages(feeds, dtypeIn(this.inputs)),
      gradYs: namedTensors(values, dtypeIn(this.ys), "gradYs"),
      params: callParams(options.params),
    };
    return readEvaluation(await this.#channel.evaluate(request, options));
  }

  /** Deletes the program on the server. Rejects with PROGRAM_NOT_FOUND. */
  async delete(options: CallOptions = {}): Promise<void> {
    checkOptions(options, CALL_OPTIONS, "delete");
    await this.#channel.unary(ProgramService.method.deleteProgram, { name: this.name }, options);
  }
}

function dtypeIn(specs: Readonly<Record<string, TensorSpec>>): DTypeOf {
  const known = new Map(Object.values(specs).map(({ name, dtype }) => [withoutOutputZero(name), dtype]));
  return (name) => known.get(withoutOutputZero(name));
}
