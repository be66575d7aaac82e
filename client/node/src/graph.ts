// Builds graphs node by node, or reads them from the bytes of a TensorFlow GraphDef.

import { readFile } from "node:fs/promises";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

import { attrValue } from "./attrs.js";
import type { AttrInput } from "./attrs.js";
import { dtypeFromNumber } from "./dtypes.js";
import type { DType } from "./dtypes.js";
import { createError } from "./errors.js";
import { GraphSchema, NodeSchema } from "./gen/gradrule/v1/graph_pb.js";
import type { Graph as GraphMessage, Node } from "./gen/gradrule/v1/graph_pb.js";
import { Output } from "./handles.js";
import { UniqueNames, withoutOutputZero } from "./names.js";
import { ruleAndParams } from "./overrides.js";
import type { Override, RuleChoice } from "./overrides.js";
import { tensor } from "./tensor.js";
import type { TensorLike } from "./tensor.js";
import { readShape } from "./wire.js";
import type { Shape, TensorSpec } from "./wire.js";

/** Attribute of a node that names the rule for its gradient. */
const GRADIENT_ATTR = "_gradient_op_type";

/** Attribute of a node whose rule may have no effect. */
const OPTIONAL_ATTR = "_gradrule_optional";

const PLACEHOLDERS = new Set(["Placeholder", "PlaceholderWithDefault", "PlaceholderV2"]);

export interface OpOptions {
  /** Name in the current scope; a number is added if the name exists. Default: the op type. */
  readonly name?: string;
  /** Attributes. Those that can be inferred from the inputs may be omitted. */
  readonly attrs?: Readonly<Record<string, AttrInput>>;
  /** Nodes that must run before this node. */
  readonly control?: readonly Output[];
}

/** An open gradientOverrideMap. `nodes`: by op type, the nodes that got a rule which an attribute cannot hold. */
interface OverrideContext {
  readonly rules: ReadonlyMap<string, RuleChoice>;
  readonly optional: boolean;
  readonly nodes: Map<string, string[]>;
}

/** A dataflow graph whose bytes are those of a TensorFlow GraphDef. */
export class Graph {
  private readonly nodes: Map<string, Node>;
  private readonly names: UniqueNames;
  private readonly scopes: string[] = [];
  private readonly contexts: OverrideContext[] = [];
  private readonly recorded: Override[] = [];
  private bytes: Uint8Array | undefined;

  constructor(private readonly message: GraphMessage = create(GraphSchema)) {
    this.nodes = new Map(message.node.map((node) => [node.name, node]));
    this.names = new UniqueNames(this.nodes.keys());
  }

  /** Reads the bytes of a GraphDef. Throws INVALID_GRAPH if they are not a graph. */
  static fromBytes(bytes: Uint8Array): Graph {
    let message: GraphMessage;
    try {
      message = fromBinary(GraphSchema, bytes);
    } catch (cause) {
      throw createError("INVALID_GRAPH", `These ${bytes.length} bytes are no GraphDef: ${(cause as Error).message}.`);
    }
    const graph = new Graph(message);
    graph.bytes = Uint8Array.from(bytes);
    return graph;
  }

  /** Returns the bytes of the GraphDef; for a loaded graph without new nodes, the bytes that were read. */
  toBytes(): Uint8Array {
    this.bytes ??= toBinary(GraphSchema, this.message);
    return this.bytes;
  }

  /** Returns the names of all nodes, in order. */
  get nodeNames(): readonly string[] {
    return this.message.node.map(({ name }) => name);
  }

  /** The placeholders, by name. */
  get inputs(): Readonly<Record<string, TensorSpec>> {
    const specs: [string, TensorSpec][] = [];
    for (const node of this.message.node) {
      const { name, op } = node;
      const dtype = PLACEHOLDERS.has(op) ? nodeDtype(node) : undefined;
      if (dtype === undefined) continue;
      specs.push([name, { name, dtype, shape: nodeShape(node), optional: op === "PlaceholderWithDefault" }]);
    }
    return Object.fromEntries(specs);
  }

  /** Overrides of nodes that gradientOverrideMap recorded; requests send them after their own overrides. */
  get nodeOverrides(): readonly Override[] {
    return this.recorded;
  }

  /** Returns a handle for the tensor `node` or `node:index`. Throws UNKNOWN_TENSOR if the node does not exist. */
  get(name: string): Output {
    const [, node, index] = /^(.*?)(?::(\d+))?$/.exec(name) ?? [];
    if (node === undefined || !this.nodes.has(node)) {
      throw createError("UNKNOWN_TENSOR", `The graph has no node ${JSON.stringify(node ?? name)}.`);
    }
    return new Output(this, node, Number(index ?? 0));
  }

  /** Returns the element type of a placeholder or a constant; undefined for other tensors. */
  dtypeOf(name: string): DType | undefined {
    const node = this.nodes.get(withoutOutputZero(name));
    return node && (PLACEHOLDERS.has(node.op) || node.op === "Const") ? nodeDtype(node) : undefined;
  }

  /** Adds a placeholder. Unknown dimensions of `shape` are null; an unknown rank is a null shape. */
  placeholder(name: string, dtype: DType, shape: Shape): Output {
    return this.op("Placeholder", [], { name, attrs: { dtype, shape } });
  }

  /** Adds a constant. `tensor` determines its element type and shape. */
  constant(value: TensorLike, options: { dtype?: DType; name?: string } = {}): Output {
    const { dtype, name } = options;
    const content = tensor(value, dtype === undefined ? {} : { dtype });
    const attrs = { dtype: content.dtype, value: content };
    return this.op("Const", [], name === undefined ? { attrs } : { name, attrs });
  }

  /** Adds a node and returns its first output, or its first `outputs` outputs. Throws INVALID_ATTR, DANGLING_INPUT. */
  op(opType: string, inputs: readonly (Output | string)[], options: OpOptions & { outputs: number }): Output[];
  op(opType: string, inputs: readonly (Output | string)[], options?: OpOptions): Output;
  op(
    opType: string,
    inputs: readonly (Output | string)[],
    options: OpOptions & { outputs?: number } = {},
  ): Output | Output[] {
    const attrs = Object.entries(options.attrs ?? {}).map(([name, value]) => [name, attrValue(opType, name, value)]);
    const requested = this.scoped(options.name ?? opType);
    const names = inputs.map((input) => this.inputName(input, requested));
    const controls = (options.control ?? []).map((output) => `^${this.get(this.inputName(output, requested)).node}`);
    const node = create(NodeSchema, {
      name: this.names.make(requested),
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

  /**
   * Adds the prefix `name/` to names of nodes that `build` creates; a number is added if the scope exists. Scopes
   * nest.
   */
  nameScope<T>(name: string, build: () => T): T {
    return within(this.scopes, this.names.make(this.scoped(name)), build);
  }

  /**
   * Sets the rule of nodes that `build` creates, by their op type: a name, a rule that is not registered, or either with
   * params. Maps nest; the innermost one with the op type applies. The rule `default` exempts an op type. `optional`: it is no
   * error if no gradient of a request reaches one of these nodes.
   */
  gradientOverrideMap<T>(
    map: Readonly<Record<string, RuleChoice>>,
    build: () => T,
    { optional = false }: { readonly optional?: boolean } = {},
  ): T {
    return within(this.contexts, { rules: new Map(Object.entries(map)), optional, nodes: new Map() }, build);
  }

  private scoped(name: string): string {
    const scope = this.scopes.at(-1);
    return scope === undefined ? name : `${scope}/${name}`;
  }

  private override(node: Node): void {
    const context = this.contexts.findLast(({ rules }) => rules.has(node.op));
    const choice = context?.rules.get(node.op);
    if (context === undefined || choice === undefined) return;
    const { optional } = context;
    const [rule, params] = ruleAndParams(choice, `gradientOverrideMap's ${node.op}`);
    if (typeof rule === "string" && Object.keys(params).length === 0) {
      node.attr[GRADIENT_ATTR] = attrValue(node.op, GRADIENT_ATTR, rule);
      if (optional) node.attr[OPTIONAL_ATTR] = attrValue(node.op, OPTIONAL_ATTR, true);
      return;
    }
    const known = context.nodes.get(node.op);
    const nodes = known ?? [];
    nodes.push(node.name);
    if (known !== undefined) return;
    context.nodes.set(node.op, nodes);
    this.recorded.push({ rule, nodes, opType: node.op, params, optional });
  }

  private inputName(input: Output | string, node: string): string {
    if (typeof input === "string") return input;
    if (input.graph !== this) {
      throw createError("DANGLING_INPUT", `Input ${input.name} of node ${node} is an output of another graph.`);
    }
    return input.name;
  }
}

/** Reads a binary GraphDef file (`.pb`). Rejects with INVALID_GRAPH if it is not a graph, or with the file's error. */
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

function nodeDtype(node: Node): DType | undefined {
  const value = node.attr["dtype"]?.value;
  return value?.case === "type" ? dtypeFromNumber(value.value) : undefined;
}

function nodeShape(node: Node): Shape {
  const value = node.attr["shape"]?.value;
  return value?.case === "shape" ? readShape(value.value) : null;
}
