// A compiled program: run many times, only tensors travel.

import { timestampDate } from "@bufbuild/protobuf/wkt";

import type { CallOptions, Channel, TransferOptions } from "./channel.js";
import { errorOf, reasonName } from "./errors.js";
import type { Detail } from "./errors.js";
import { ProgramService } from "./gen/gradrule/v1/program_pb.js";
import type { CompileProgramResponse, Program as ProgramMessage } from "./gen/gradrule/v1/program_pb.js";
import { bare } from "./names.js";
import { digestsOf, evaluationOf, resolutionOf } from "./results.js";
import type { Digests, Evaluation, Resolution } from "./results.js";
import { callParams, feedMessages, namedTensors, splitGradYs } from "./spec.js";
import type { CallParams, DTypeOf, Feeds, GradYs } from "./spec.js";
import { specsOf } from "./wire.js";
import type { TensorSpec } from "./wire.js";

/** What one call of a program may say beside its feeds. */
export interface ProgramCallOptions extends CallOptions, TransferOptions {
  /** Param values by the label of an override; nothing is compiled again. */
  readonly params?: CallParams;
  /** Upstream gradients: values by y, or in the order of ys. */
  readonly gradYs?: GradYs;
}

/** What a program does: which tensors, which rules. */
class Signature {
  /** What a call feeds. */
  readonly inputs: Readonly<Record<string, TensorSpec>>;
  /** What it puts out. */
  readonly outputs: Readonly<Record<string, TensorSpec>>;
  /** What it differentiates. */
  readonly ys: Readonly<Record<string, TensorSpec>>;
  /** With respect to what. */
  readonly xs: Readonly<Record<string, TensorSpec>>;
  /** Which node got which rule. */
  readonly overrides: readonly Resolution[];
  /** Nodes on the path that no override took. */
  readonly defaultGradientNodes: readonly string[];
  /** Nodes that rewrites replaced. */
  readonly rewritten: readonly string[];

  constructor(message: ProgramMessage | undefined) {
    this.inputs = specsOf(message?.inputs ?? []);
    this.outputs = specsOf(message?.outputs ?? []);
    this.ys = specsOf(message?.ys ?? []);
    this.xs = specsOf(message?.xs ?? []);
    this.overrides = (message?.overrides ?? []).map(resolutionOf);
    this.defaultGradientNodes = message?.defaultGradientNodes ?? [];
    this.rewritten = message?.rewritten ?? [];
  }
}

/** What a program would be. `findings` lists all that is wrong; then the rest is empty. */
export class Explanation extends Signature {
  constructor(
    message: ProgramMessage | undefined,
    readonly findings: readonly Detail[],
  ) {
    super(message);
  }

  /** Throws the error that `evaluate` or `compile` would reject with, if there is one. */
  throwFindings(): void {
    const [first] = this.findings;
    if (first) throw errorOf(first.reason, first.message, { details: this.findings });
  }
}

/** From the answer of CompileProgram with validate_only. */
export function explanationOf({ program, findings }: CompileProgramResponse): Explanation {
  return new Explanation(
    program,
    findings.map(({ reason, message, node, field }) => ({ reason: reasonName(reason), message, node, field })),
  );
}

/** A compiled program with the connection to its server. */
export class Program extends Signature {
  /** `programs/{id}`. */
  readonly name: string;
  readonly digests: Digests;
  /** Where it runs, `CPU:0` for example. */
  readonly device: string;
  readonly createTime: Date | null;
  readonly #channel: Channel;
  // In the order asked, which the keys of a record need not keep.
  readonly #ys: readonly string[];

  constructor(channel: Channel, message: ProgramMessage) {
    super(message);
    this.name = message.name;
    this.digests = digestsOf(message.digests);
    this.device = message.device;
    this.createTime = message.createTime ? timestampDate(message.createTime) : null;
    this.#channel = channel;
    this.#ys = message.ys.map(({ name }) => name);
  }

  /** Runs once. Rejects with MISSING_FEED, UNKNOWN_FEED, FEED_DTYPE, FEED_SHAPE, EXECUTION_FAILED and others. */
  async evaluate(feeds: Feeds = {}, options: ProgramCallOptions = {}): Promise<Evaluation> {
    const { inGraph, values } = splitGradYs(options.gradYs, this.#ys);
    const [named] = inGraph;
    if (named) {
      throw errorOf(
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
    return evaluationOf(await this.#channel.evaluate(request, options));
  }

  /** Forgets the program on its server. PROGRAM_NOT_FOUND. */
  async delete(options: CallOptions = {}): Promise<void> {
    await this.#channel.unary(ProgramService.method.deleteProgram, { name: this.name }, options);
  }
}

function dtypeIn(specs: Readonly<Record<string, TensorSpec>>): DTypeOf {
  const known = new Map(Object.values(specs).map(({ name, dtype }) => [bare(name), dtype]));
  return (name) => known.get(bare(name));
}
