// Errors by reason: one class for all, one subclass per reason, and how a gRPC failure becomes one of them.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { Metadata, status as Code } from "@grpc/grpc-js";
import type { ServiceError } from "@grpc/grpc-js";

import {
  BadRequestSchema,
  ErrorInfoSchema,
  ResourceInfoSchema,
  RetryInfoSchema,
  StatusSchema,
} from "./gen/google/rpc/status_pb.js";
import { ErrorReason } from "./gen/gradrule/v1/errors_pb.js";

/** Why a request failed: the values of `ErrorReason` in the protos, without their prefix. */
export type Reason = Exclude<keyof typeof ErrorReason, "UNSPECIFIED">;

/** All reasons. */
export const REASONS: readonly Reason[] = Object.keys(ErrorReason).filter(
  (key): key is Reason => Number.isNaN(Number(key)) && key !== "UNSPECIFIED",
);

/** One thing that is wrong with a request. */
export interface Finding {
  /** Path to the field of the request, or the node; empty where the error is not about one. */
  readonly field: string;
  readonly message: string;
  readonly reason: string;
}

/** What the server told beside reason and message. */
export interface Details {
  /** Everything that is wrong, the first deciding the reason. */
  readonly findings: readonly Finding[];
  /** More about the error, `findings_total` for example. */
  readonly metadata: Readonly<Record<string, string>>;
  /** What the error is about, a rule for example. */
  readonly resource: { readonly type: string; readonly name: string } | null;
}

/** Anything that gradrule refuses or fails at. The message says what is wrong, where, and what would be right. */
export class GradruleError extends Error {
  override readonly name: string = "GradruleError";

  constructor(
    /** Why; a value that this client does not know yet comes from a newer server. */
    readonly reason: Reason | (string & {}),
    message: string,
    /** gRPC status code. */
    readonly code: Code = Code.INVALID_ARGUMENT,
    readonly details: Details = { findings: [], metadata: {}, resource: null },
    /** Seconds after which the same request may work; null where the server did not say. */
    readonly retryDelay: number | null = null,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

type Pascal<S extends string> = S extends `${infer Head}_${infer Tail}`
  ? `${Pascal<Head>}${Pascal<Tail>}`
  : Capitalize<Lowercase<S>>;

/** The class of a reason: `UNKNOWN_RULE` is `errors.UnknownRuleError`, `INTERNAL` is `errors.InternalError`. */
export type ErrorName<R extends Reason = Reason> = `${Pascal<R>}Error`;

function errorName(reason: Reason): ErrorName {
  const words = reason.split("_").map((word) => word[0]! + word.slice(1).toLowerCase());
  return `${words.join("")}Error` as ErrorName;
}

const classes = new Map<string, typeof GradruleError>();
const byName: Record<string, typeof GradruleError> = {};
for (const reason of REASONS) {
  const name = errorName(reason);
  const subclass = {
    [name]: class extends GradruleError {
      override readonly name = name;
    },
  }[name]!;
  classes.set(reason, subclass);
  byName[name] = subclass;
}

/** One subclass of GradruleError per reason, for `instanceof`. */
export const errors = Object.freeze(byName) as { readonly [N in ErrorName]: typeof GradruleError };

/** An error of the class of its reason. */
export function errorOf(
  reason: string,
  message: string,
  code: Code,
  details?: Details,
  retryDelay?: number | null,
  options?: ErrorOptions,
): GradruleError {
  return new (classes.get(reason) ?? GradruleError)(reason, message, code, details, retryDelay, options);
}

/** A refusal that the client makes itself, before anything is sent. */
export function refusal(reason: Reason, message: string): GradruleError {
  return errorOf(reason, message, Code.INVALID_ARGUMENT);
}

/** The refusal of a tensor's data, shape or element type. */
export function invalidTensor(message: string): GradruleError {
  return refusal("INVALID_TENSOR", message);
}

/** The error that a failed call stands for: the server's details where there are some, else by its code. */
export function fromServiceError(failure: ServiceError): GradruleError {
  const [trailer] = failure.metadata instanceof Metadata ? failure.metadata.get("grpc-status-details-bin") : [];
  const detailed = trailer instanceof Uint8Array ? fromTrailer(trailer, failure) : undefined;
  return (
    detailed ?? errorOf(reasonOfCode(failure.code), failure.details, failure.code, undefined, null, { cause: failure })
  );
}

/** Reason of a code that gRPC itself made, so that no details came with it. */
export function reasonOfCode(code: Code): Reason {
  switch (code) {
    case Code.DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case Code.CANCELLED:
      return "CANCELLED";
    case Code.UNAVAILABLE:
      return "UNAVAILABLE";
    case Code.RESOURCE_EXHAUSTED:
      return "MESSAGE_TOO_LARGE";
    case Code.UNIMPLEMENTED:
      return "UNSUPPORTED";
    default:
      return "INTERNAL";
  }
}

function fromTrailer(trailer: Uint8Array, failure: ServiceError): GradruleError | undefined {
  let reason: string | undefined;
  let metadata: Record<string, string> = {};
  let resource: Details["resource"] = null;
  let retryDelay: number | null = null;
  const findings: Finding[] = [];
  const status = fromBinary(StatusSchema, trailer);
  for (const detail of status.details) {
    const info = anyUnpack(detail, ErrorInfoSchema);
    if (info?.domain === "gradrule") ({ reason, metadata } = info);
    for (const violation of anyUnpack(detail, BadRequestSchema)?.fieldViolations ?? []) {
      findings.push({ field: violation.field, message: violation.description, reason: violation.reason });
    }
    const delay = anyUnpack(detail, RetryInfoSchema)?.retryDelay;
    if (delay) retryDelay = Number(delay.seconds) + delay.nanos / 1e9;
    const about = anyUnpack(detail, ResourceInfoSchema);
    if (about) resource = { type: about.resourceType, name: about.resourceName };
  }
  if (reason === undefined) return undefined;
  const details = { findings, metadata, resource };
  return errorOf(reason, status.message, failure.code, details, retryDelay, { cause: failure });
}
