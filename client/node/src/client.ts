// The client: one method per operation of the server.

import { attrValueForGroup } from "./attrs.js";
import type { AttrInput } from "./attrs.js";
import { CALL_OPTIONS, Channel } from "./channel.js";
import type { CallOptions, ConnectOptions } from "./channel.js";
import { createError } from "./errors.js";
import { ProgramService } from "./gen/gradrule/v1/program_pb.js";
import { RuleKind, RuleService } from "./gen/gradrule/v1/rule_pb.js";
import type { AttrValue } from "./gen/gradrule/v1/graph_pb.js";
import { Graph } from "./graph.js";
import { tensorNames } from "./handles.js";
import type { OnnxModel } from "./onnx.js";
import type { RuleRef } from "./overrides.js";
import { PROGRAM_CALL_OPTIONS, Program, readExplanation } from "./program.js";
import type { Explanation, ProgramCallOptions } from "./program.js";
import { readEvaluation } from "./results.js";
import type { Evaluation } from "./results.js";
import { definitionMessage, namedOrRule, paramValues, readPreset, readRule } from "./rules.js";
import type { Kind, ParamDefaults, Params, Preset, Rule, RuleForm } from "./rules.js";
import { SPEC_OPTIONS, callParams, choiceValue, feedMessages, namedTensors, specMessage, splitGradYs } from "./spec.js";
import type { Feeds, GradYs, SpecOptions } from "./spec.js";
import type { Tensor } from "./tensor.js";
import { checkOptions } from "./values.js";
import type { OptionNames } from "./values.js";
import { readNamedTensor } from "./wire.js";

const PAGE_SIZE = 200;

export interface ListRulesOptions extends CallOptions {
  /** Lists only the rules of this kind. */
  readonly kind?: Kind;
}

export interface CreateRuleOptions extends CallOptions {
  readonly params?: ParamDefaults;
  readonly description?: string;
  /** Whether to replace your rule of this name if it has other content; programs that were compiled with it keep it. */
  readonly replace?: boolean;
}

export interface SampleRuleOptions extends CallOptions {
  readonly params?: Params;
  /** Op type that computes missing outputs and default gradients. Default for a rule of kind OP: its own op type. */
  readonly opType?: string;
  /** Attributes of that op that cannot be inferred from its inputs. */
  readonly attrs?: Readonly<Record<string, AttrInput>>;
}

/** Gradients of a rule: `dx`, `dx1`, … (null: not connected), and the op's outputs `y`, `y1`, … if an op was run. */
export interface Sample {
  readonly gradients: Readonly<Record<string, Tensor | null>>;
  readonly outputs: Readonly<Record<string, Tensor>>;
}

export interface EvaluateOptions extends SpecOptions, ProgramCallOptions {
  readonly feeds?: Feeds;
}

export interface CompileOptions extends SpecOptions, CallOptions {
  /** ID of the program, which then has the name `programs/{name}`. Default: derived from the content. */
  readonly name?: string;
  /** Upstream gradients that are tensors of the graph, by handle or name. Calls give the other values. */
  readonly gradYs?: GradYs;
}

const LIST_RULES_OPTIONS = {
  ...CALL_OPTIONS,
  kind: true,
} as const satisfies OptionNames<ListRulesOptions>;

const CREATE_RULE_OPTIONS = {
  ...CALL_OPTIONS,
  params: true,
  description: true,
  replace: true,
} as const satisfies OptionNames<CreateRuleOptions>;

const SAMPLE_RULE_OPTIONS = {
  ...CALL_OPTIONS,
  params: true,
  opType: true,
  attrs: true,
} as const satisfies OptionNames<SampleRuleOptions>;

const EVALUATE_OPTIONS = {
  ...SPEC_OPTIONS,
  ...PROGRAM_CALL_OPTIONS,
  feeds: true,
} as const satisfies OptionNames<EvaluateOptions>;

const COMPILE_OPTIONS = {
  ...SPEC_OPTIONS,
  ...CALL_OPTIONS,
  name: true,
  gradYs: true,
} as const satisfies OptionNames<CompileOptions>;

const RULE_KINDS = {
  user: RuleKind.USER,
  builtin: RuleKind.BUILTIN,
  op: RuleKind.OP,
} as const satisfies Readonly<Record<Kind, RuleKind>>;

/** Creates a client. It connects at the first call, which rejects with UNAVAILABLE if it cannot reach the server. */
export function connect(target: string, options: ConnectOptions = {}): Client {
  return new Client(new Channel(target, options));
}

/** A connection to a gradrule server. All methods reject with a GradruleError. Times are in seconds. */
export class Client {
  readonly #channel: Channel;

  constructor(channel: Channel) {
    this.#channel = channel;
  }

  /**
   * Registers a rule, or returns the one with equal content. Rejects with RULE_EXISTS, INVALID_EXPRESSION,
   * INVALID_RULE.
   */
  async createRule(name: string, form: RuleForm, options: CreateRuleOptions = {}): Promise<Rule> {
    checkOptions(options, CREATE_RULE_OPTIONS, "createRule");
    const { params = {}, description = "", replace = false } = options;
    const definition = definitionMessage({ ...(typeof form === "string" ? { expression: form } : form), params });
    const request = { rule: { name: resourceName("rules", name), definition, description }, replace };
    return required(readRule, (await this.#channel.unary(RuleService.method.createRule, request, options)).rule);
  }

  /** Returns one rule. Rejects with UNKNOWN_RULE, whose message suggests similar names. */
  async getRule(name: string, options: CallOptions = {}): Promise<Rule> {
    checkOptions(options, CALL_OPTIONS, "getRule");
    const request = { name: resourceName("rules", name) };
    return required(readRule, (await this.#channel.unary(RuleService.method.getRule, request, options)).rule);
  }

  /** Returns all rules, or those of one kind. */
  async listRules(options: ListRulesOptions = {}): Promise<Rule[]> {
    checkOptions(options, LIST_RULES_OPTIONS, "listRules");
    const kind =
      options.kind === undefined
        ? RuleKind.UNSPECIFIED
        : choiceValue(options.kind, RULE_KINDS, "kind", "INVALID_PARAM");
    const rules: Rule[] = [];
    let pageToken = "";
    do {
      const request = { kind, pageSize: PAGE_SIZE, pageToken };
      const page = await this.#channel.unary(RuleService.method.listRules, request, options);
      rules.push(...page.rules.map(readRule));
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return rules;
  }

  /** Deletes a rule. Compiled programs still use it. Rejects with UNKNOWN_RULE, RULE_READ_ONLY. */
  async deleteRule(name: string, options: CallOptions = {}): Promise<void> {
    checkOptions(options, CALL_OPTIONS, "deleteRule");
    await this.#channel.unary(RuleService.method.deleteRule, { name: resourceName("rules", name) }, options);
  }

  /** Returns all presets, by name: lists of overrides that `{ preset: name }` adds to the overrides of a program. */
  async listPresets(options: CallOptions = {}): Promise<Preset[]> {
    checkOptions(options, CALL_OPTIONS, "listPresets");
    return (await this.#channel.unary(RuleService.method.listPresets, {}, options)).presets.map(readPreset);
  }

  /** Runs a rule on tensors: `sampleRule("ste", { x: [1, 2], dy: [1, 1] })`. Default of `dy`: ones. */
  async sampleRule(rule: RuleRef, values: Feeds, options: SampleRuleOptions = {}): Promise<Sample> {
    checkOptions(options, SAMPLE_RULE_OPTIONS, "sampleRule");
    if (typeof rule === "string") rule = namedOrRule(rule);
    const op = options.opType ?? (typeof rule === "string" ? rule : "");
    const attrs = Object.entries(options.attrs ?? {}).map(([name, value]) => [
      name,
      attrValueForGroup(op, name, value),
    ]);
    const request = {
      source:
        typeof rule === "string"
          ? { case: "name" as const, value: resourceName("rules", rule) }
          : { case: "definition" as const, value: definitionMessage(rule, Object.keys(options.params ?? {})) },
      values: feedMessages(values, () => undefined),
      params: paramValues(options.params ?? {}),
      opType: options.opType ?? "",
      attrs: Object.fromEntries(attrs) as Record<string, AttrValue>,
    };
    const answer = await this.#channel.unary(RuleService.method.sampleRule, request, options);
    return {
      gradients: Object.fromEntries(answer.gradients.map((entry) => [entry.name, readNamedTensor(entry)])),
      outputs: Object.fromEntries(answer.outputs.map((entry) => [entry.name, required(readNamedTensor, entry)!])),
    };
  }

  /** Computes forward outputs and gradients of a graph or an ONNX model in one call. */
  async evaluate(graph: Graph | OnnxModel, options: EvaluateOptions = {}): Promise<Evaluation> {
    checkOptions(options, EVALUATE_OPTIONS, "evaluate");
    const built = graph instanceof Graph ? graph : undefined;
    const gradYs = splitGradYs(options.gradYs, tensorNames(options.ys, built), built);
    const dtypeOf = (name: string) => built?.dtypeOf(name);
    const request = {
      target: { case: "spec" as const, value: specMessage(graph, options, gradYs) },
      feeds: feedMessages(options.feeds ?? {}, dtypeOf, built),
      gradYs: namedTensors(gradYs.values, dtypeOf, "gradYs"),
      params: callParams(options.params),
    };
    return readEvaluation(await this.#channel.evaluate(request, options));
  }

  /** Returns the rule of each node, the signature and all errors. Runs and stores nothing. */
  async explain(graph: Graph | OnnxModel, options: EvaluateOptions = {}): Promise<Explanation> {
    checkOptions(options, EVALUATE_OPTIONS, "explain");
    const built = graph instanceof Graph ? graph : undefined;
    const gradYs = splitGradYs(options.gradYs, tensorNames(options.ys, built), built);
    const request = { spec: specMessage(graph, options, gradYs), validateOnly: true };
    return readExplanation(await this.#channel.unary(ProgramService.method.compileProgram, request, options));
  }

  /** Checks, compiles and stores a program. The server keeps it until it is deleted. */
  async compile(graph: Graph | OnnxModel, options: CompileOptions = {}): Promise<Program> {
    checkOptions(options, COMPILE_OPTIONS, "compile");
    const built = graph instanceof Graph ? graph : undefined;
    const gradYs = splitGradYs(options.gradYs, tensorNames(options.ys, built), built);
    const [given] = gradYs.values;
    if (given) {
      throw createError(
        "INVALID_DERIVATIVE",
        `gradYs gives a value for ${given[0]}; values are given with each call, names of tensors here.`,
      );
    }
    const request = { spec: specMessage(graph, options, gradYs), programId: options.name ?? "" };
    const answer = await this.#channel.unary(ProgramService.method.compileProgram, request, options);
    return required((message) => new Program(this.#channel, message), answer.program);
  }

  /** Returns a stored program. Rejects with PROGRAM_NOT_FOUND. */
  async program(name: string, options: CallOptions = {}): Promise<Program> {
    checkOptions(options, CALL_OPTIONS, "program");
    const request = { name: resourceName("programs", name) };
    const answer = await this.#channel.unary(ProgramService.method.getProgram, request, options);
    return required((message) => new Program(this.#channel, message), answer.program);
  }

  /** Returns all stored programs, without their overrides, which `program` returns. */
  async listPrograms(options: CallOptions = {}): Promise<Program[]> {
    checkOptions(options, CALL_OPTIONS, "listPrograms");
    const programs: Program[] = [];
    let pageToken = "";
    do {
      const request = { pageSize: PAGE_SIZE, pageToken };
      const page = await this.#channel.unary(ProgramService.method.listPrograms, request, options);
      programs.push(...page.programs.map((message) => new Program(this.#channel, message)));
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return programs;
  }

  /** Deletes a program. Rejects with PROGRAM_NOT_FOUND. */
  async deleteProgram(name: string, options: CallOptions = {}): Promise<void> {
    checkOptions(options, CALL_OPTIONS, "deleteProgram");
    await this.#channel.unary(ProgramService.method.deleteProgram, { name: resourceName("programs", name) }, options);
  }

  /** Closes the connection. Later calls reject with UNAVAILABLE. */
  close(): void {
    this.#channel.close();
  }
}

/** Returns `collection/name`; adds the collection if it is missing. */
function resourceName(collection: string, name: string): string {
  return name.startsWith(`${collection}/`) ? name : `${collection}/${name}`;
}

function required<M, T>(read: (message: M) => T, message: M | undefined): T {
  if (message === undefined) throw createError("INTERNAL", "The server's answer is empty.");
  return read(message);
}
