// A compiled program: run many times, only tensors travel.

import { timestampDate } from "@bufbuild/protobuf/wkt";

import type { CallOptions, Channel } from "./channel.js";
import { errorOf } from "./errors.js";
import { GradientService } from "./gen/gradrule/v1/evaluate_pb.js";
import type { Program as ProgramMessage } from "./gen/gradrule/v1/program_pb.js";
import { digestsOf, evaluationOf, resolutionOf } from "./results.js";
import type { Digests, Evaluation, Resolution } from "./results.js";
import { callParams, feedMessages, namedTensors, splitGradYs } from "./spec.js";
import type { CallParams, Feeds, GradYs } from "./spec.js";
import { specOf } from "./wire.js";
import type { TensorSpec } from "./wire.js";

/** What one call of a program may say beside its feeds. */
export interface ProgramCallOptions extends CallOptions {
  /** Param values by the label of an override; nothing is compiled again. */
  readonly params?: CallParams;
  /** Upstream gradients: values by y, or in the order of ys. */
  readonly gradYs?: GradYs;
}

/** What is known of a compiled program. */
export class ProgramInfo {
  /** `programs/{id}`. */
  readonly name: string;
  readonly digests: Digests;
  /** What a call feeds. */
  readonly inputs: readonly TensorSpec[];
  /** What it puts out. */
  readonly outputs: readonly TensorSpec[];
  readonly ys: readonly TensorSpec[];
  readonly xs: readonly TensorSpec[];
  /** Which node got which rule. */
  readonly overrides: readonly Resolution[];
  /** Nodes on the path that no override took. */
  readonly defaulted: readonly string[];
  readonly device: string;
  readonly createTime: Date | null;

  constructor(message: ProgramMessage) {
    this.name = message.name;
    this.digests = digestsOf(message.digests);
    this.inputs = message.inputs.map(specOf);
    this.outputs = message.outputs.map(specOf);
    this.ys = message.ys.map(specOf);
    this.xs = message.xs.map(specOf);
    this.overrides = message.overrides.map(resolutionOf);
    this.defaulted = message.defaulted;
    this.device = message.device;
    this.createTime = message.createTime ? timestampDate(message.createTime) : null;
  }
}

/** A compiled program with the connection to its server. */
export class Program extends ProgramInfo {
  readonly #channel: Channel;

  constructor(channel: Channel, message: ProgramMessage) {
    super(message);
    this.#channel = channel;
  }

  /** Runs once. Rejects with MISSING_FEED, UNKNOWN_FEED, FEED_DTYPE, FEED_SHAPE, EXECUTION_FAILED and others. */
  async evaluate(feeds: Feeds = {}, options: ProgramCallOptions = {}): Promise<Evaluation> {
    const { inGraph, values } = splitGradYs(
      options.gradYs,
      this.ys.map(({ name }) => name),
    );
    if (inGraph.length > 0) {
      throw errorOf(
        "INVALID_DERIVATIVE",
        `gradYs names the tensor ${inGraph[0]!.tensor}; tensors of the graph are chosen in compile(), a call gives values.`,
      );
    }
    const known = dtypes(this.inputs);
    const knownYs = dtypes(this.ys);
    const request = {
      target: { case: "program" as const, value: this.name },
      feeds: feedMessages(feeds, (name) => known.get(plain(name))),
      gradYs: namedTensors(
        values.map(({ y, value }) => [y, value]),
        (name) => knownYs.get(plain(name)),
      ),
      params: callParams(options.params),
    };
    return evaluationOf(await this.#channel.unary(GradientService.method.evaluate, request, options));
  }
}

function dtypes(specs: readonly TensorSpec[]): Map<string, TensorSpec["dtype"]> {
  return new Map(specs.map(({ name, dtype }) => [plain(name), dtype]));
}

/** `y:0` is `y`. */
function plain(name: string): string {
  return name.replace(/:0$/, "");
}
