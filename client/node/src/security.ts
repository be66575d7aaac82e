// How a client proves who it is, and sees to it that nobody else hears.

import { readFileSync } from "node:fs";
import { isIP } from "node:net";

import { credentials } from "@grpc/grpc-js";
import type { ChannelCredentials } from "@grpc/grpc-js";

import { errorOf } from "./errors.js";

/** A file in PEM by its path, or its bytes. */
export type Pem = string | Uint8Array;

export interface TlsOptions {
  /** Certificates of the authorities that may vouch for the server. Default: those that Node brings along. */
  readonly root?: Pem;
  /** The client's certificate chain, where the server asks for one; `key` is its private key. */
  readonly certificate?: Pem;
  readonly key?: Pem;
}

/** Credentials for `connect(target, { credentials })`: TLS, and the client's own certificate if given. */
export function tls(options: TlsOptions = {}): ChannelCredentials {
  if ((options.certificate === undefined) !== (options.key === undefined)) {
    throw errorOf("INVALID_PARAM", "A client's certificate and its key go together: give both or none.");
  }
  return credentials.createSsl(content(options.root), content(options.key), content(options.certificate));
}

/** Throws for a token that would travel readable by others, or is none. */
export function checkToken(
  target: string,
  token: string | undefined,
  isEncrypted: boolean,
  insecureToken: boolean,
): void {
  if (token === undefined) return;
  if (!/^[\x21-\x7e]+$/.test(token)) {
    throw errorOf("INVALID_PARAM", "The token is empty, or holds characters that no token has.");
  }
  if (!isEncrypted && !insecureToken && !isLocal(target)) {
    throw errorOf(
      "INVALID_PARAM",
      `The token would travel unencrypted to '${target}': connect with { credentials: tls() }, or say ` +
        "insecureToken: true where something else encrypts.",
    );
  }
}

/** Whether a target is this machine by its name alone. */
function isLocal(target: string): boolean {
  if (/^(unix|unix-abstract|vsock):/.test(target)) return true;
  // `dns://authority/name` and `dns:name` are one.
  const addresses = target.replace(/^(dns|ipv4|ipv6):(\/\/[^/]*\/)?/, "");
  return addresses.split(",").every(isLoopback);
}

function isLoopback(address: string): boolean {
  // Two colons without brackets are an address of IPv6 that has no port.
  const host = (isIP(address) ? address : address.replace(/:\d+$/, "")).replace(/^\[(.*)\]$/, "$1");
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

function content(given: Pem | undefined): Buffer | null {
  if (given === undefined) return null;
  return typeof given === "string" ? readFileSync(given) : Buffer.from(given);
}
