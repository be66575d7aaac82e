// The client: one method per thing that a server does.

import { attrOfAny } from "./attrs.js";
import type { AttrInput } from "./attrs.js";
import { Channel } from "./channel.js";
import type { CallOptions, ConnectOptions } from "./channel.js";
import { errorOf } from "./errors.js";
import { ProgramService } from "./gen/gradrule/v1/program_pb.js";
import { RuleKind, RuleService } from "./gen/gradrule/v1/rule_pb.js";
import type { AttrValue } from "./gen/gradrule/v1/graph_pb.js";
import type { Graph } from "./graph.js";
import { namesOf } from "./handles.js";
import type { RuleRef } from "./overrides.js";
import { Program, explanationOf } from "./program.js";
import type { Explanation, ProgramCallOptions } from "./program.js";
import { evaluationOf } from "./results.js";
import type { Evaluation } from "./results.js";
import { definitionMessage, paramValues, presetOf, ruleOf } from "./rules.js";
import type { Kind, ParamDefaults, Params, Preset, Rule, RuleForm } from "./rules.js";
import { callParams, feedMessages, namedTensors, specMessage, splitGradYs } from "./spec.js";
import type { Feeds, GradYs, SpecOptions } from "./spec.js";
import type { Tensor } from "./tensor.js";
import { namedTensorOf } from "./wire.js";

const PAGE_SIZE = 200;

export interface CreateRuleOptions extends CallOptions {
  readonly params?: ParamDefaults;
  readonly description?: string;
}

export interface SampleRuleOptions extends CallOptions {
  readonly params?: Params;
  /** Op whose outputs and own gradient the rule sees. Default for OP rules: the rule's own. */
  readonly opType?: string;
  /** Attributes of that op that do not follow from its inputs. */
  readonly attrs?: Readonly<Record<string, AttrInput>>;
}

/** What a rule gives: `dx`, `dx1`, … (null: not connected), and the op's outputs `y`, `y1`, … where one was run. */
export interface Sample {
  readonly gradients: Readonly<Record<string, Tensor | null>>;
  readonly outputs: Readonly<Record<string, Tensor>>;
}

export interface EvaluateOptions extends SpecOptions, ProgramCallOptions {
  readonly feeds?: Feeds;
}

export interface CompileOptions extends SpecOptions, CallOptions {
  /** Id of the program, which is then `programs/{name}`. Default: made from the content. */
  readonly name?: string;
  /** Upstream gradients that are tensors of the graph, by handle or name; values are given with each call. */
  readonly gradYs?: GradYs;
}

/** Makes a client. Nothing is sent before the first call; an unreachable server is UNAVAILABLE then. */
export function connect(target: string, options: ConnectOptions = {}): Client {
  return new Client(new Channel(target, options));
}

/** A connection to a gradrule server. Every method rejects with a GradruleError; times are in seconds. */
export class Client {
  readonly #channel: Channel;

  constructor(channel: Channel) {
    this.#channel = channel;
  }

  /** Registers a rule; equal content returns the rule that is there. RULE_EXISTS, INVALID_EXPRESSION, INVALID_RULE. */
  async createRule(name: string, form: RuleForm, options: CreateRuleOptions = {}): Promise<Rule> {
    const { params = {}, description = "" } = options;
    const definition = definitionMessage({ ...(typeof form === "string" ? { expression: form } : form), params });
    const request = { rule: { name: resource("rules", name), definition, description } };
    return wanted(ruleOf, (await this.#channel.unary(RuleService.method.createRule, request, options)).rule);
  }

  /** One rule. UNKNOWN_RULE, whose message suggests near names. */
  async getRule(name: string, options: CallOptions = {}): Promise<Rule> {
    const request = { name: resource("rules", name) };
    return wanted(ruleOf, (await this.#channel.unary(RuleService.method.getRule, request, options)).rule);
  }

  /** All rules, or those of one kind. */
  async listRules(options: CallOptions & { readonly kind?: Kind } = {}): Promise<Rule[]> {
    const kind =
      options.kind === undefined ? RuleKind.UNSPECIFIED : RuleKind[options.kind.toUpperCase() as Uppercase<Kind>];
    const rules: Rule[] = [];
    let pageToken = "";
    do {
      const request = { kind, pageSize: PAGE_SIZE, pageToken };
      const page = await this.#channel.unary(RuleService.method.listRules, request, options);
      rules.push(...page.rules.map(ruleOf));
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return rules;
  }

  /** Forgets a rule. UNKNOWN_RULE, RULE_READ_ONLY. Programs that were compiled with it keep it. */
  async deleteRule(name: string, options: CallOptions = {}): Promise<void> {
    await this.#channel.unary(RuleService.method.deleteRule, { name: resource("rules", name) }, options);
  }

  /** All presets, by name: named override lists, which `{ preset: name }` in a list of overrides chooses. */
  async listPresets(options: CallOptions = {}): Promise<Preset[]> {
    return (await this.#channel.unary(RuleService.method.listPresets, {}, options)).presets.map(presetOf);
  }

  /** Runs a rule on tensors: `sampleRule("ste", { x: [1, 2], dy: [1, 1] })`. A `dy` left out is ones. */
  async sampleRule(rule: RuleRef, values: Feeds, options: SampleRuleOptions = {}): Promise<Sample> {
    const op = options.opType ?? (typeof rule === "string" ? rule : "");
    const attrs = Object.entries(options.attrs ?? {}).map(([name, value]) => [name, attrOfAny(op, name, value)]);
    const request = {
      source:
        typeof rule === "string"
          ? { case: "name" as const, value: resource("rules", rule) }
          : { case: "definition" as const, value: definitionMessage(rule, Object.keys(options.params ?? {})) },
      values: feedMessages(values, () => undefined),
      params: paramValues(options.params ?? {}),
      opType: options.opType ?? "",
      attrs: Object.fromEntries(attrs) as Record<string, AttrValue>,
    };
    const answer = await this.#channel.unary(RuleService.method.sampleRule, request, options);
    return {
      gradients: Object.fromEntries(answer.gradients.map((entry) => [entry.name, namedTensorOf(entry)])),
      outputs: Object.fromEntries(answer.outputs.map((entry) => [entry.name, wanted(namedTensorOf, entry)!])),
    };
  }

  /** Forward outputs and gradients of a graph in one call. */
  async evaluate(graph: Graph, options: EvaluateOptions = {}): Promise<Evaluation> {
    const gradYs = splitGradYs(options.gradYs, namesOf(options.ys, graph), graph);
    const dtypeOf = (name: string) => graph.dtypeOf(name);
    const request = {
      target: { case: "spec" as const, value: specMessage(graph, options, gradYs) },
      feeds: feedMessages(options.feeds ?? {}, dtypeOf, graph),
      gradYs: namedTensors(gradYs.values, dtypeOf, "gradYs"),
      params: callParams(options.params),
    };
    return evaluationOf(await this.#channel.evaluate(request, options));
  }

  /** Which node gets which rule, the signature, and all that is wrong; nothing is run or kept. */
  async explain(graph: Graph, options: EvaluateOptions = {}): Promise<Explanation> {
    const gradYs = splitGradYs(options.gradYs, namesOf(options.ys, graph), graph);
    const request = { spec: specMessage(graph, options, gradYs), validateOnly: true };
    return explanationOf(await this.#channel.unary(ProgramService.method.compileProgram, request, options));
  }

  /** Checks and compiles a program, which the server keeps until it is deleted. */
  async compile(graph: Graph, options: CompileOptions = {}): Promise<Program> {
    const gradYs = splitGradYs(options.gradYs, namesOf(options.ys, graph), graph);
    const [given] = gradYs.values;
    if (given) {
      throw errorOf(
        "INVALID_DERIVATIVE",
        `gradYs gives a value for ${given[0]}; values are given with each call, names of tensors here.`,
      );
    }
    const request = { spec: specMessage(graph, options, gradYs), programId: options.name ?? "" };
    const answer = await this.#channel.unary(ProgramService.method.compileProgram, request, options);
    return wanted((message) => new Program(this.#channel, message), answer.program);
  }

  /** A program that was compiled before. PROGRAM_NOT_FOUND. */
  async program(name: string, options: CallOptions = {}): Promise<Program> {
    const request = { name: resource("programs", name) };
    const answer = await this.#channel.unary(ProgramService.method.getProgram, request, options);
    return wanted((message) => new Program(this.#channel, message), answer.program);
  }

  /** All programs; what became of their overrides is told by `program`. */
  async listPrograms(options: CallOptions = {}): Promise<Program[]> {
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

  /** Forgets a program. PROGRAM_NOT_FOUND. */
  async deleteProgram(name: string, options: CallOptions = {}): Promise<void> {
    await this.#channel.unary(ProgramService.method.deleteProgram, { name: resource("programs", name) }, options);
  }

  /** Ends the connection. Later calls are UNAVAILABLE. */
  close(): void {
    this.#channel.close();
  }
}

/** `collection/name`, for a bare name too. */
function resource(collection: string, name: string): string {
  return name.startsWith(`${collection}/`) ? name : `${collection}/${name}`;
}

function wanted<M, T>(read: (message: M) => T, message: M | undefined): T {
  if (message === undefined) throw errorOf("INTERNAL", "The server's answer is empty.");
  return read(message);
}
