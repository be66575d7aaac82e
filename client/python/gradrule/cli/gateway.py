"""Implements `gradrule gateway`: an HTTP and JSON interface to a server, and the console."""

from __future__ import annotations

import argparse
import ipaddress
import re
from typing import TYPE_CHECKING, Any

from gradrule.cli.connection import (
    DEFAULT_TARGET,
    INSECURE_TOKEN_VARIABLE,
    TARGET_VARIABLE,
    add_tls,
    credentials,
    default_target,
    is_set,
    seconds,
)
from gradrule.cli.failures import USAGE, CommandError, missing_extra

if TYPE_CHECKING:
    import grpc

DEFAULT_PORT = 8480
_PARTS = {"gradrule_gateway", "orjson", "starlette", "uvicorn", "h11", "click", "anyio"}
_NAME = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:{_NAME})(?P<port>:[0-9]{{1,5}})?")
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add(commands: Any) -> None:
    """Adds the command `gateway` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "gateway",
        help="serve a server's API over HTTP and JSON, and the console in the browser",
        description="Serves the API of a gradrule server over HTTP and JSON, and the console in the browser.",
    )
    group = parser.add_argument_group("listening")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; :: means all, of IPv4 and IPv6 [default: 127.0.0.1]"
    )
    group.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"port to listen on; 0 selects a free one [{DEFAULT_PORT}]"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="the gateway's TLS certificate chain, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="private key of that certificate, PEM")
    group.add_argument(
        "--allowed-host",
        metavar="NAME",
        type=_host_name,
        action="append",
        default=[],
        help="name, without port, by which clients may call the gateway (header Host), besides localhost and the "
        "address that it listens on; * allows all; can be repeated",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        type=_origin,
        action="append",
        default=[],
        help="origin of web pages that may use the API, such as https://app.example.org; can be repeated",
    )
    upstream = parser.add_argument_group("server")
    upstream.add_argument(
        "--server",
        "--target",
        dest="target",
        metavar="HOST:PORT",
        default=default_target(),
        help=f"address of the gradrule server [default: {DEFAULT_TARGET}] [{TARGET_VARIABLE}]",
    )
    upstream.add_argument(
        "--insecure-token",
        action="store_true",
        default=is_set(INSECURE_TOKEN_VARIABLE),
        help=f"pass tokens of callers on unencrypted to a server on another machine [{INSECURE_TOKEN_VARIABLE}=1]",
    )
    upstream.add_argument(
        "--server-name", metavar="NAME", default="", help="name in the server's certificate, if it is not its host"
    )
    upstream.add_argument("--server-cert", default="", help=argparse.SUPPRESS)
    add_tls(upstream)
    _add_limits(parser.add_argument_group("limits and logs"))
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-body-bytes",
        metavar="BYTES",
        type=_size,
        default=64 << 20,
        help="longest body of a request, except blobs; k, M and G are allowed [default: 64M]",
    )
    group.add_argument(
        "--max-requests",
        metavar="N",
        type=_count,
        default=256,
        help="maximum number of concurrent requests; one caller may have half of them [256]",
    )
    group.add_argument(
        "--max-bytes-in-flight",
        metavar="BYTES",
        type=_size,
        default=512 << 20,
        help="maximum total size of bodies, converted requests and answers at the same time; one caller may have three "
        "quarters of it [default: 512M]",
    )
    group.add_argument(
        "--max-connections",
        metavar="N",
        type=_count,
        default=1024,
        help="maximum number of open connections; one address may have a quarter of them [1024]",
    )
    group.add_argument(
        "--idle-s",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="time that a client may take for the next bytes, sending or reading [default: 30]",
    )
    group.add_argument(
        "--drain-s",
        metavar="SECONDS",
        type=seconds,
        default=20.0,
        help="time that running requests get to finish after SIGTERM [default: 20]",
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    group.add_argument(
        "--log-format", choices=("auto", "json", "text"), default="auto", help="auto: text on a terminal, else JSON"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the gateway until a signal ends it; returns the exit code."""
    if bool(options.tls_cert) != bool(options.tls_key):
        raise CommandError("--tls-cert needs --tls-key, and --tls-key needs --tls-cert", USAGE)
    try:
        from gradrule_gateway import serving
        from gradrule_gateway.guard import Limits
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] not in _PARTS:
            raise
        raise missing_extra(f"the gateway is not complete ({cause.name} is missing)", "gateway") from None
    limits = Limits(
        hosts=_hosts(options.host, options.allowed_host),
        origins=frozenset(options.cors_origin),
        max_body_bytes=options.max_body_bytes,
        max_requests=options.max_requests,
        max_bytes_in_flight=options.max_bytes_in_flight,
        max_connections=options.max_connections,
        idle_s=options.idle_s,
    )
    return serving.run(
        serving.Settings(
            target=options.target,
            read_credentials=lambda: _credentials(options),
            credential_files=_credential_files(options),
            insecure_tokens=options.insecure_token,
            host=options.host,
            port=options.port,
            tls_cert=options.tls_cert or "",
            tls_key=options.tls_key or "",
            limits=limits,
            drain_s=options.drain_s,
            log_level=options.log_level,
            log_format=options.log_format,
            parent=options.parent,
        )
    )


def _credentials(options: argparse.Namespace) -> tuple[grpc.ChannelCredentials | None, str]:
    """Returns the credentials for the server, and the name in its certificate."""
    if options.server_cert:
        from gradrule._rpc import channels
        from gradrule_gateway.serving import name_in

        return channels.tls(options.server_cert), name_in(options.server_cert)
    return credentials(options), options.server_name


def _credential_files(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the files that `_credentials` reads."""
    files = (options.server_cert, options.tls_ca, options.client_cert, options.client_key)
    return tuple(path for path in files if path)


def _hosts(host: str, allowed: list[str]) -> frozenset[str]:
    """Returns the allowed hosts: names of this machine's loopback, the address listened on, and those of the flag."""
    found = {"localhost", "127.0.0.1", "[::1]", *allowed}
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found.add(host.lower())
    else:
        if not address.is_unspecified:
            found.add(f"[{address}]" if address.version == 6 else str(address))
    return frozenset(found)


def _host_name(text: str) -> str:
    """Returns a name as the header Host has it, without a port."""
    name = text.lower()
    if name != "*" and not _HOST.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"expected a name without scheme and port, such as gradrule.example.org, 192.0.2.7 or [2001:db8::7], got "
            f"{text!r}"
        )
    return name


def _origin(text: str) -> str:
    """Returns an origin as browsers send it."""
    origin = text.lower().removesuffix("/")
    found = _ORIGIN.fullmatch(origin)
    if found is None or (found["scheme"], found["port"]) in (("http", ":80"), ("https", ":443")):
        raise argparse.ArgumentTypeError(
            "expected scheme and host, and the port if it is not the scheme's own, such as https://app.example.org or "
            f"http://localhost:3000, got {text!r}"
        )
    return origin


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    digits, suffix = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or not int(digits) or (suffix and suffix not in _SUFFIXES):
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 67108864 or 64M, got {text!r}")
    return int(digits) * _SUFFIXES.get(suffix, 1)
