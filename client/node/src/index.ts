// The public API of the Node client.

export { attr } from "./attrs.js";
export type { AttrInput, AttrKind } from "./attrs.js";
export type { CallOptions, ConnectOptions, TransferOptions } from "./channel.js";
export { Client, connect } from "./client.js";
export type {
  CompileOptions,
  CreateRuleOptions,
  EvaluateOptions,
  ListRulesOptions,
  Sample,
  SampleRuleOptions,
} from "./client.js";
export { DTYPES } from "./dtypes.js";
export type { DType, DataOf, TypedArray } from "./dtypes.js";
export { GradruleError, REASONS, errors } from "./errors.js";
export type { Detail, ErrorName, Reason } from "./errors.js";
export { bfloat16Bits, bfloat16Value, float16Bits, float16Value } from "./float16.js";
export { Graph, load } from "./graph.js";
export type { OpOptions } from "./graph.js";
export { Output } from "./handles.js";
export type { Name, Names } from "./handles.js";
export { OnnxModel, loadOnnx } from "./onnx.js";
export type {
  Conditions,
  Override,
  Overrides,
  Position,
  PresetChoice,
  Region,
  RuleChoice,
  RuleRef,
} from "./overrides.js";
export type { Transfer } from "./packing.js";
export { Explanation, Program } from "./program.js";
export type { ProgramCallOptions } from "./program.js";
export type { Digests, Evaluation, Gradient, GradientKind, Resolution } from "./results.js";
export type { Kind, Param, ParamDefaults, Params, Preset, Rule, RuleForm, RuleSource } from "./rules.js";
export { tls } from "./security.js";
export type { Pem, TlsOptions } from "./security.js";
export type { Batching, CallParams, Feeds, GradY, GradYs, SpecOptions } from "./spec.js";
export { Tensor, tensor } from "./tensor.js";
export type { Complex, Nested, Scalar, TensorLike } from "./tensor.js";
export { Sparse } from "./wire.js";
export type { Shape, TensorSpec } from "./wire.js";
