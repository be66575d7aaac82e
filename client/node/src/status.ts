// Converts failed calls to typed errors.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { status as Code } from "@grpc/grpc-js";
import type { ServiceError } from "@grpc/grpc-js";

import { createError } from "./errors.js";
import type { Detail, GradruleError, Reason } from "./errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  ResourceInfoSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import type { BadRequest_FieldViolation, ErrorInfo } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

const NODE = "node:";
// What gRPC says if it could not connect, after the name of its way to choose a server.
const NOT_CONNECTED = /^(\w+: )?(No connection established|Name resolution failed)/;
// What gRPC says if a proxy answered with the HTTP status of a bad gateway, or of a service that is away or too slow.
const PROXY_STATUS = /Received HTTP status code (50[234])/;
const REFUSED = /\b(ECONNREFUSED|ENOENT)\b/;

/**
 * Returns the typed error of a failed call: from the server's details if there are any, otherwise from its code.
 * `target`: that of the client, because gRPC names only the last address that it tried.
 */
export function errorFromFailure(failure: ServiceError, target: string): GradruleError {
  const [trailer] = failure.metadata?.get("grpc-status-details-bin") ?? [];
  const status = trailer instanceof Uint8Array ? parseStatus(trailer) : undefined;
  const info = status?.details.map((detail) => anyUnpack(detail, ErrorInfoSchema)).find((found) => found?.reason);
  if (status && info?.domain === "gradrule") return errorFromStatus(status, info, failure.code);
  const message = connectionProblem(failure, target) ?? failure.details;
  return createError(reasonFromCode(failure.code), message, { code: failure.code, cause: failure });
}

/** Returns whether a call failed because no server or proxy was reached. */
export function isUnreached(failure: ServiceError): boolean {
  return NOT_CONNECTED.test(failure.details);
}

function connectionProblem(failure: ServiceError, target: string): string | undefined {
  if (isUnreached(failure) && REFUSED.test(failure.details)) {
    const port = /:(\d+)$/.exec(target)?.[1];
    const serve = port ? `gradrule serve --port ${port}` : "gradrule serve";
    return `No server listens at ${target}; start one (${serve}), or connect to the address of another.`;
  }
  const status = PROXY_STATUS.exec(failure.details)?.[1];
  return (
    status && `The proxy at ${target} reaches no server (HTTP status ${status}); its servers may be starting again.`
  );
}

/** Returns the typed error of a serialized status, which a stream answers a failed call with. */
export function errorFromStatusBytes(bytes: Uint8Array): GradruleError {
  const status = parseStatus(bytes);
  if (status === undefined) return createError("INTERNAL", "The server's answer cannot be read.");
  const info = status.details.map((detail) => anyUnpack(detail, ErrorInfoSchema)).find((found) => found?.reason);
  const code = status.code as Code;
  return info ? errorFromStatus(status, info, code) : createError(reasonFromCode(code), status.message, { code });
}

/** Parses a status. Returns undefined if it is malformed, because a proxy's trailer must not hide the code. */
function parseStatus(trailer: Uint8Array): Status | undefined {
  try {
    return fromBinary(StatusSchema, trailer);
  } catch {
    return undefined;
  }
}

function errorFromStatus(status: Status, info: ErrorInfo, code: Code): GradruleError {
  const details: Detail[] = [];
  let retryDelay: number | null = null;
  let resource: GradruleError["resource"] = null;
  for (const packed of status.details) {
    const violations = anyUnpack(packed, BadRequestSchema)?.fieldViolations ?? [];
    details.push(...violations.map((violation) => readViolation(violation, info.reason)));
    const delay = anyUnpack(packed, RetryInfoSchema)?.retryDelay;
    if (delay) retryDelay = Number(delay.seconds) + delay.nanos / 1e9;
    const about = anyUnpack(packed, ResourceInfoSchema);
    if (about) resource = { type: about.resourceType, name: about.resourceName };
  }
  const total = /^\d+$/.exec(info.metadata["findings_total"] ?? "")?.[0];
  const rest = { code, details, resource, retryDelay };
  return createError(
    info.reason,
    status.message,
    total === undefined ? rest : { ...rest, findingsTotal: Number(total) },
  );
}

function readViolation({ reason, description, field }: BadRequest_FieldViolation, otherwise: string): Detail {
  const isNode = field.startsWith(NODE);
  return {
    reason: reason || otherwise,
    message: description,
    node: isNode ? field.slice(NODE.length) : "",
    field: isNode ? "" : field,
  };
}

/** Returns the reason for the code of an error that gRPC raised itself, without details. */
function reasonFromCode(code: Code): Reason {
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
