// Errors: one base class, and one subclass per reason.

import { status as Code } from "@grpc/grpc-js";

import { ErrorReason } from "./gen/gradrule/v1/errors_pb.js";

/** Why a request failed: the values of `ErrorReason` in the protos, without their prefix. */
export type Reason = Exclude<keyof typeof ErrorReason, "UNSPECIFIED">;

/** All reasons. */
export const REASONS: readonly Reason[] = Object.keys(ErrorReason).filter(
  (key): key is Reason => Number.isNaN(Number(key)) && key !== "UNSPECIFIED",
);

/** Returns the name of a reason; its number if this client does not know the reason. */
export function reasonName(reason: ErrorReason): string {
  return ErrorReason[reason] ?? String(reason);
}

/** gRPC codes of reasons; default: INVALID_ARGUMENT. */
const CODES: { readonly [R in Reason]?: Code } = {
  UNKNOWN_RULE: Code.NOT_FOUND,
  RULE_EXISTS: Code.ALREADY_EXISTS,
  RULE_READ_ONLY: Code.FAILED_PRECONDITION,
  PROGRAM_NOT_FOUND: Code.NOT_FOUND,
  PROGRAM_EXISTS: Code.ALREADY_EXISTS,
  EXECUTION_FAILED: Code.FAILED_PRECONDITION,
  ENGINE_CRASHED: Code.ABORTED,
  ENGINE_UNAVAILABLE: Code.UNAVAILABLE,
  OVERLOADED: Code.RESOURCE_EXHAUSTED,
  MESSAGE_TOO_LARGE: Code.RESOURCE_EXHAUSTED,
  DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
  CANCELLED: Code.CANCELLED,
  UNAVAILABLE: Code.UNAVAILABLE,
  UNSUPPORTED: Code.UNIMPLEMENTED,
  INTERNAL: Code.INTERNAL,
  BLOB_NOT_FOUND: Code.NOT_FOUND,
  HANDLE_EXPIRED: Code.FAILED_PRECONDITION,
  QUOTA_EXCEEDED: Code.RESOURCE_EXHAUSTED,
  SESSION_LOST: Code.ABORTED,
  UNAUTHENTICATED: Code.UNAUTHENTICATED,
  PERMISSION_DENIED: Code.PERMISSION_DENIED,
  OP_NOT_ALLOWED: Code.PERMISSION_DENIED,
  QUARANTINED: Code.FAILED_PRECONDITION,
  MEMORY_EXCEEDED: Code.RESOURCE_EXHAUSTED,
  SHARED_MEMORY_LOST: Code.FAILED_PRECONDITION,
};

/** One error: its reason, a message, and its location: a node's name, a request's field, or neither. */
export interface Detail {
  readonly reason: string;
  readonly message: string;
  readonly node: string;
  readonly field: string;
}

/** Properties of an error besides its reason and message. */
interface ErrorProperties {
  readonly code?: Code;
  readonly details?: readonly Detail[];
  readonly findingsTotal?: number;
  readonly resource?: GradruleError["resource"];
  readonly retryDelay?: number | null;
  readonly cause?: unknown;
}

/** Base class of all errors of gradrule. The message says what is wrong, where, and how to correct it. */
export class GradruleError extends Error {
  override readonly name: string = "GradruleError";
  /** gRPC status code. */
  readonly code: Code;
  /** All errors that were found; the first one determines the reason. */
  readonly details: readonly Detail[];
  /** Number of errors that were found; larger than the length of `details` if not all fit into the answer. */
  readonly findingsTotal: number;
  /** Resource that the error is about, for example a rule; null if the server did not name one. */
  readonly resource: { readonly type: string; readonly name: string } | null;
  /** Seconds after which the same request may succeed; null if waiting does not help. */
  readonly retryDelay: number | null;

  constructor(
    /** Why the request failed. A newer server may send reasons that this client does not know. */
    readonly reason: Reason | (string & {}),
    message: string,
    properties: ErrorProperties = {},
  ) {
    super(message, properties.cause === undefined ? undefined : { cause: properties.cause });
    this.code = properties.code ?? CODES[reason as Reason] ?? Code.INVALID_ARGUMENT;
    this.details = properties.details?.length ? properties.details : [{ reason, message, node: "", field: "" }];
    this.findingsTotal = properties.findingsTotal ?? this.details.length;
    this.resource = properties.resource ?? null;
    this.retryDelay = properties.retryDelay ?? null;
  }
}

type Pascal<S extends string> = S extends `${infer Head}_${infer Tail}`
  ? `${Pascal<Head>}${Pascal<Tail>}`
  : Capitalize<Lowercase<S>>;

/** The class of a reason: `UNKNOWN_RULE` is `errors.UnknownRuleError`, `INTERNAL` is `errors.InternalError`. */
export type ErrorName<R extends Reason = Reason> = `${Pascal<R>}Error`;

const classes = new Map<string, typeof GradruleError>();
const byName: Record<string, typeof GradruleError> = {};
for (const reason of REASONS) {
  const words = reason.split("_").map((word) => word.slice(0, 1) + word.slice(1).toLowerCase());
  const name = `${words.join("")}Error`;
  const subclass = class extends GradruleError {
    override readonly name = name;
  };
  Object.defineProperty(subclass, "name", { value: name });
  classes.set(reason, subclass);
  byName[name] = subclass;
}

/** One subclass of GradruleError per reason, for `instanceof`. */
export const errors = Object.freeze(byName) as { readonly [N in ErrorName]: typeof GradruleError };

/** Creates an error of the reason's class. */
export function createError(
  reason: Reason | (string & {}),
  message: string,
  properties: ErrorProperties = {},
): GradruleError {
  return new (classes.get(reason) ?? GradruleError)(reason, message, properties);
}

/** Creates an error about a tensor's data, shape or element type. */
export function invalidTensor(message: string): GradruleError {
  return createError("INVALID_TENSOR", message);
}
