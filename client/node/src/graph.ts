// Graphs: made node by node, or read from the bytes of a TensorFlow GraphDef.

import { readFile } from "node:fs/promises";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

import { attrOf } from "./attrs.js";
import type { AttrInput } from "./attrs.js";
import { dtypeOfDt } from "./dtypes.js";
import type { DType } from "./dtypes.js";
import { errorOf } from "./errors.js";
import { GraphSchema, NodeSchema } from "./gen/gradrule/v1/graph_pb.js";
import type { Graph as GraphMessage, Node } from "./gen/gradrule/v1/graph_pb.js";
import { Output } from "./handles.js";
import { UniqueNames, bare } from "./names.js";
import { ruleAndParams } from "./overrides.js";
import type { Override, RuleChoice } from "./overrides.js";
import { tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { shapeOf } from "./wire.js";
import type { Shape, TensorSpec } from "./wire.js";

/** The attribute by which a node names the rule that gives its gradient. */
const GRADIENT_ATTR = "_gradient_op_type";

const PLACEHOLDERS = new Set(["Placeholder", "PlaceholderWithDefault", "PlaceholderV2"]);

export interface OpOptions {
  /** Name within the current scope, with a number where it is taken. Default: the op type. */
  readonly name?: string;
  /** Attributes. Those that follow from the inputs may be left out: the server fills them in. */
  readonly attrs?: Readonly<Record<string, AttrInput>>;
  /** Nodes that must run first. */
  readonly control?: readonly Output[];
}

/** A dataflow graph whose bytes are those of a TensorFlow GraphDef. */
export class Graph {
  private readonly nodes: Map<string, Node>;
  private readonly names: UniqueNames;
  private readonly scopes: string[] = [];
  private readonly overrideMaps: ReadonlyMap<string, RuleChoice>[] = [];
  private readonly recorded: Override[] = [];
  private bytes: Uint8Array | undefined;

  constructor(private readonly message: GraphMessage = create(GraphSchema)) {
    this.nodes = new Map(message.node.map((node) => [node.name, node]));
    this.names = new UniqueNames(this.nodes.keys());
  }

  /** The graph with these bytes (a GraphDef's). Throws INVALID_GRAPH where they are none. */
  static fromBytes(bytes: Uint8Array): Graph {
    let message: GraphMessage;
    try {
      message = fromBinary(GraphSchema, bytes);
    } catch (cause) {
      throw errorOf("INVALID_GRAPH", `These ${bytes.length} bytes are no GraphDef: ${(cause as Error).message}.`);
    }
    const graph = new Graph(message);
    graph.bytes = Uint8Array.from(bytes);
    return graph;
  }

  /** Bytes of the GraphDef; of a loaded graph that nobody extended the very bytes that were read. */
  toBytes(): Uint8Array {
    this.bytes ??= toBinary(GraphSchema, this.message);
    return this.bytes;
  }

  /** Names of all nodes, in order. */
  get nodeNames(): readonly string[] {
    return this.message.node.map(({ name }) => name);
  }

  /** The placeholders, by name. */
  get inputs(): Readonly<Record<string, TensorSpec>> {
    const specs: [string, TensorSpec][] = [];
    for (const node of this.message.node) {
      const { name, op } = node;
      const dtype = PLACEHOLDERS.has(op) ? dtypeOfNode(node) : undefined;
      if (dtype === undefined) continue;
      specs.push([name, { name, dtype, shape: shapeOfNode(node), optional: op === "PlaceholderWithDefault" }]);
    }
    return Object.fromEntries(specs);
  }

  /** What override maps recorded for single nodes beside what nodes can carry; a request sends it after its own. */
  get nodeOverrides(): readonly Override[] {
    return this.recorded;
  }

  /** A handle for a tensor by its name, `node` or `node:index`. Throws UNKNOWN_TENSOR where no such node is. */
  get(name: string): Output {
    const [, node, index] = /^(.*?)(?::(\d+))?$/.exec(name) ?? [];
    if (node === undefined || !this.nodes.has(node)) {
      throw errorOf("UNKNOWN_TENSOR", `The graph has no node ${JSON.stringify(node ?? name)}.`);
    }
    return new Output(this, node, Number(index ?? 0));
  }

  /** Element type of a placeholder or a constant, by its name; undefined where only the server knows. */
  dtypeOf(name: string): DType | undefined {
    const node = this.nodes.get(bare(name));
    return node && (PLACEHOLDERS.has(node.op) || node.op === "Const") ? dtypeOfNode(node) : undefined;
  }

  /** An input. `shape` has null where a dimension is unknown, and is null for an unknown rank. */
  placeholder(name: string, dtype: DType, shape: Shape): Output {
    return this.op("Placeholder", [], { name, attrs: { dtype, shape } });
  }

  /** A constant; element type and shape as `tensor` decides them. */
  constant(value: TensorLike, options: { dtype?: DType; name?: string } = {}): Output {
    const { dtype, name } = options;
    const content = tensor(value, dtype === undefined ? {} : { dtype });
    const attrs = { dtype: content.dtype, value: content };
    return this.op("Const", [], name === undefined ? { attrs } : { name, attrs });
  }

  /** Adds a node and returns its first output, or as many as `outputs` says. Throws INVALID_ATTR, DANGLING_INPUT. */
  op(opType: string, inputs: readonly (Output | string)[], options: OpOptions & { outputs: number }): Output[];
  op(opType: string, inputs: readonly (Output | string)[], options?: OpOptions): Output;
  op(
    opType: string,
    inputs: readonly (Output | string)[],
    options: OpOptions & { outputs?: number } = {},
  ): Output | Output[] {
    const attrs = Object.entries(options.attrs ?? {}).map(([name, value]) => [name, attrOf(opType, name, value)]);
    const wished = this.scoped(options.name ?? opType);
    const names = inputs.map((input) => this.inputName(input, wished));
    const controls = (options.control ?? []).map((output) => `^${this.get(this.inputName(output, wished)).node}`);
    const node = create(NodeSchema, {
      name: this.names.make(wished),
      op: opType,
      input: [...names, ...controls],
      attr: Object.fromEntries(attrs) as Node["attr"],
    });
    this.override(node);
    this.message.node.push(node);
    this.nodes.set(node.name, node);
    this.bytes = undefined;
    if (options.outputs === undefined) return new Output(this, node.name, 0);
    return Array.from({ length: options.outputs }, (_, index) => new Output(this, node.name, index));
  }

  /** Puts `name/` before the names of the nodes that `build` makes, with a number where it is taken. Scopes nest. */
  nameScope<T>(name: string, build: () => T): T {
    return within(this.scopes, this.names.make(this.scoped(name)), build);
  }

  /**
   * Nodes that `build` makes get the rule that the map gives for their op type: a name, a rule that is registered
   * nowhere, or either with params. Maps nest: the innermost that names the op type decides; `default` carves out an
   * exception.
   */
  gradientOverrideMap<T>(map: Readonly<Record<string, RuleChoice>>, build: () => T): T {
    return within(this.overrideMaps, new Map(Object.entries(map)), build);
  }

  private scoped(name: string): string {
    const scope = this.scopes.at(-1);
    return scope === undefined ? name : `${scope}/${name}`;
  }

  private override(node: Node): void {
    const choice = this.overrideMaps.findLast((map) => map.has(node.op))?.get(node.op);
    if (choice === undefined) return;
    const [rule, params] = ruleAndParams(choice, `gradientOverrideMap's ${node.op}`);
    if (typeof rule === "string" && Object.keys(params).length === 0) {
      node.attr[GRADIENT_ATTR] = attrOf(node.op, GRADIENT_ATTR, rule);
    } else {
      // Optional, as in TensorFlow: a node of the context may lie off the path of what a request differentiates.
      this.recorded.push({ rule, node: node.name, opType: node.op, params, label: node.op, optional: true });
    }
  }

  private inputName(input: Output | string, node: string): string {
    if (typeof input === "string") return input;
    if (input.graph !== this) {
      throw errorOf("DANGLING_INPUT", `Input ${input.name} of node ${node} is an output of another graph.`);
    }
    return input.name;
  }
}

/** Reads a GraphDef's binary file (`.pb`). Rejects with INVALID_GRAPH where it is none, or with the file's error. */
export async function load(path: string | URL): Promise<Graph> {
  return Graph.fromBytes(await readFile(path));
}

function within<C, T>(stack: C[], entry: C, build: () => T): T {
  stack.push(entry);
  try {
    const result = build();
    if (result instanceof Promise) throw new TypeError("build a graph in a function that is not async");
    return result;
  } finally {
    stack.pop();
  }
}

function dtypeOfNode(node: Node): DType | undefined {
  const value = node.attr["dtype"]?.value;
  return value?.case === "type" ? dtypeOfDt(value.value) : undefined;
}

function shapeOfNode(node: Node): Shape {
  const value = node.attr["shape"]?.value;
  return value?.case === "shape" ? shapeOf(value.value) : null;
}
