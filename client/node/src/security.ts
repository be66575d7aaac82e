// Credentials: TLS and bearer tokens.

import { readFileSync } from "node:fs";
import { isIP } from "node:net";

import { credentials } from "@grpc/grpc-js";
import type { ChannelCredentials } from "@grpc/grpc-js";

import { createError } from "./errors.js";

/** PEM data: the path of a file, or bytes. */
export type Pem = string | Uint8Array;

export interface TlsOptions {
  /** Root certificates that may sign the server's certificate. Default: those that are part of Node. */
  readonly root?: Pem;
  /** The client's certificate chain, if the server requires one; `key` is its private key. */
  readonly certificate?: Pem;
  readonly key?: Pem;
}

/** Creates TLS credentials for `connect(target, { credentials })`, with the client's certificate if given. */
export function tls(options: TlsOptions = {}): ChannelCredentials {
  if ((options.certificate === undefined) !== (options.key === undefined)) {
    throw createError(
      "INVALID_PARAM",
      "A client's certificate needs its key and the key its certificate: give both or none.",
    );
  }
  return credentials.createSsl(content(options.root), content(options.key), content(options.certificate));
}

/** Throws if a token is not valid or would be sent unencrypted to another machine. */
export function checkToken(
  target: string,
  token: string | undefined,
  isEncrypted: boolean,
  insecureToken: boolean,
): void {
  if (token === undefined) return;
  if (!/^[\x21-\x7e]+$/.test(token)) {
    throw createError("INVALID_PARAM", "The token is empty or has characters that tokens must not have.");
  }
  if (!isEncrypted && !insecureToken && !isLocal(target)) {
    throw createError(
      "INVALID_PARAM",
      `The token would be sent unencrypted to '${target}': connect with { credentials: tls() }, or set ` +
        "insecureToken: true if the connection is encrypted by other means.",
    );
  }
}

/** Returns whether the name of a target shows that it is this machine. */
function isLocal(target: string): boolean {
  if (/^(unix|unix-abstract|vsock):/.test(target)) return true;
  // `dns://authority/name` and `dns:name` mean the same.
  const addresses = target.replace(/^(dns|ipv4|ipv6):(\/\/[^/]*\/)?/, "");
  return addresses.split(",").every(isLoopback);
}

function isLoopback(address: string): boolean {
  // Two colons without brackets: an IPv6 address without a port.
  const host = (isIP(address) ? address : address.replace(/:\d+$/, "")).replace(/^\[(.*)\]$/, "$1");
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

function content(given: Pem | undefined): Buffer | null {
  if (given === undefined) return null;
  return typeof given === "string" ? readFileSync(given) : Buffer.from(given);
}
