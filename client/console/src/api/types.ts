import type { JsonNumber } from "./numbers";

// Answers of the gateway in its compact form. Fields with their default value are left out, and int64 fields are strings, as in
// protobuf's JSON.

export type RuleKind = "RULE_KIND_USER" | "RULE_KIND_BUILTIN" | "RULE_KIND_OP";

export interface Tensor {
  dtype: string;
  shape: number[];
  values: NestedNumbers;
}

export type NestedNumbers = JsonNumber | NestedNumbers[];

export interface RuleParam {
  name: string;
  defaultValue?: JsonNumber | Tensor;
  description?: string;
  range?: string;
}

export interface RuleDefinition {
  expression?: string;
  graph?: unknown;
  params?: RuleParam[];
  gradient?: RuleDefinition;
}

export interface Rule {
  /** `rules/{name}` */
  name: string;
  kind?: RuleKind;
  definition?: RuleDefinition;
  description?: string;
  opTypes?: string[];
  reference?: string;
  digest?: string;
  createTime?: string;
  perSample?: boolean;
  aliases?: string[];
  formula?: string;
  family?: string;
  hidesBuiltin?: boolean;
  trueGradient?: boolean;
}

export interface SampleAnswer {
  gradients?: Record<string, Tensor | null>;
  outputs?: Record<string, Tensor | null>;
}

export interface TensorSpec {
  name?: string;
  dtype?: string;
  /** null: unknown rank; a null dimension is unknown. */
  shape?: (number | null)[] | null;
}

export interface Resolution {
  node?: string;
  opType?: string;
  rule?: string;
  label?: string;
  status?: string;
  function?: string;
  nodes?: string[];
  qualifiedName?: string;
}

export interface Program {
  /** `programs/{id}` */
  name: string;
  digests?: { graph?: string; program?: string };
  inputs?: TensorSpec[];
  outputs?: TensorSpec[];
  ys?: TensorSpec[];
  xs?: TensorSpec[];
  overrides?: Resolution[];
  defaultGradientNodes?: string[];
  device?: string;
  createTime?: string;
  rewritten?: string[];
  aliases?: Record<string, string>;
  sparseGradients?: string[];
  drawsRandom?: boolean;
}

export interface Usage {
  used?: string;
  limit?: string;
}

export interface EngineStatus {
  index?: number;
  device?: string;
  pid?: string;
  ready?: boolean;
  running?: number;
  waiting?: number;
  programs?: number;
  residentBytes?: string;
  uptime?: string;
  ended?: Record<string, string>;
  tenant?: string;
  holdsSessions?: boolean;
}

export interface TenantStatus {
  name?: string;
  requests?: Usage;
  programs?: Usage;
  rules?: Usage;
  sessions?: Usage;
  sessionBytes?: Usage;
  handles?: Usage;
  handleBytes?: Usage;
  blobBytes?: Usage;
}

export interface ServerStatus {
  version?: string;
  tensorflowVersion?: string;
  uptime?: string;
  ready?: boolean;
  engines?: EngineStatus[];
  spareEngines?: number;
  requests?: Usage;
  caches?: { name?: string; entries?: Usage; sizeBytes?: Usage }[];
  tenants?: TenantStatus[];
  tenantCount?: number;
  quarantinedPrograms?: { digest?: string; reason?: string; remaining?: string }[];
  quarantinedProgramCount?: number;
  compileWorkers?: { count?: number; busy?: number; waiting?: number; residentBytes?: string };
  host?: string;
  registry?: { database?: string; problem?: string; unavailableFor?: string; blobs?: string };
}
