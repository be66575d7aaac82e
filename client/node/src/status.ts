// From a failed call to the error that it stands for.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { status as Code } from "@grpc/grpc-js";
import type { ServiceError } from "@grpc/grpc-js";

import { errorOf } from "./errors.js";
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

/** The typed error of a failed call: by the server's details where there are some, else by its code. */
export function errorOfFailure(failure: ServiceError): GradruleError {
  const [trailer] = failure.metadata?.get("grpc-status-details-bin") ?? [];
  const status = trailer instanceof Uint8Array ? statusOf(trailer) : undefined;
  const info = status?.details.map((detail) => anyUnpack(detail, ErrorInfoSchema)).find((found) => found?.reason);
  if (status && info?.domain === "gradrule") return errorOfStatus(status, info, failure.code);
  return errorOf(reasonOf(failure.code), failure.details, { code: failure.code, cause: failure });
}

/** The typed error in the bytes of a status, with which a stream answers a call that failed. */
export function errorOfStatusBytes(bytes: Uint8Array): GradruleError {
  const status = statusOf(bytes);
  if (status === undefined) return errorOf("INTERNAL", "The server's answer cannot be read.");
  const info = status.details.map((detail) => anyUnpack(detail, ErrorInfoSchema)).find((found) => found?.reason);
  const code = status.code as Code;
  return info ? errorOfStatus(status, info, code) : errorOf(reasonOf(code), status.message, { code });
}

/** Undefined where the bytes are no status: a proxy's trailer must not hide the code. */
function statusOf(trailer: Uint8Array): Status | undefined {
  try {
    return fromBinary(StatusSchema, trailer);
  } catch {
    return undefined;
  }
}

function errorOfStatus(status: Status, info: ErrorInfo, code: Code): GradruleError {
  const details: Detail[] = [];
  let retryDelay: number | null = null;
  let resource: GradruleError["resource"] = null;
  for (const packed of status.details) {
    const violations = anyUnpack(packed, BadRequestSchema)?.fieldViolations ?? [];
    details.push(...violations.map((violation) => detailOf(violation, info.reason)));
    const delay = anyUnpack(packed, RetryInfoSchema)?.retryDelay;
    if (delay) retryDelay = Number(delay.seconds) + delay.nanos / 1e9;
    const about = anyUnpack(packed, ResourceInfoSchema);
    if (about) resource = { type: about.resourceType, name: about.resourceName };
  }
  const total = /^\d+$/.exec(info.metadata["findings_total"] ?? "")?.[0];
  const rest = { code, details, resource, retryDelay };
  return errorOf(info.reason, status.message, total === undefined ? rest : { ...rest, findingsTotal: Number(total) });
}

function detailOf({ reason, description, field }: BadRequest_FieldViolation, otherwise: string): Detail {
  const isNode = field.startsWith(NODE);
  return {
    reason: reason || otherwise,
    message: description,
    node: isNode ? field.slice(NODE.length) : "",
    field: isNode ? "" : field,
  };
}

/** Reason of a code that gRPC itself made, so that no details came with it. */
function reasonOf(code: Code): Reason {
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
