"""Generates random HTTP/2 for one connection from a seed, from small faults in valid calls to garbage."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hpack import Encoder

from tests.battery import wire
from tests.service import raw

# Marks sent text, which must not appear in the log; no request id may look like this.
SECRET = b"zq(secret)zq"
FORGED = b'\n{"level": "info", "message": "forged"}\n'

_SERVICES = ("RuleService", "ProgramService", "GradientService", "SessionService", "BlobService", "AdminService")
PATHS = (
    b"/grpc.health.v1.Health/Check",
    b"/grpc.health.v1.Health/Watch",
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    b"/gradrule.v1.RuleService/GetRule",
    b"/gradrule.v1.RuleService/ListRules",
    b"/gradrule.v1.RuleService/CreateRule",
    b"/gradrule.v1.ProgramService/ListPrograms",
    b"/gradrule.v1.GradientService/Evaluate",
    b"/gradrule.v1.GradientService/StreamEvaluate",
    b"/gradrule.v1.SessionService/RunSession",
    b"/gradrule.v1.BlobService/UploadBlob",
    b"/gradrule.v1.BlobService/FindMissingBlobs",
    b"/gradrule.v1.AdminService/GetServerStatus",
)
# Paths of calls that end by themselves.
ENDING = tuple(path for path in PATHS if not path.endswith(b"/Watch"))
TIMEOUTS = (b"1S", b"0n", b"1n", b"99999999H", b"999999999H", b"-1S", b"S", b"1", b"1s", b" 1S", b"1.5S", b"\xff", b"")
_TYPES = (
    b"application/grpc",
    b"application/grpc+proto",
    b"application/json",
    b"text/plain",
    b"application/grpc-web",
    b"",
)
_NAMES = (
    b"authorization",
    b"grpc-encoding",
    b"grpc-accept-encoding",
    b"grpc-message",
    b"grpc-status",
    b"grpc-tags-bin",
    b"grpc-trace-bin",
    b"grpc-previous-rpc-attempts",
    b"grpc-retry-pushback-ms",
    b"x-request-id",
    b"traceparent",
    b"user-agent",
    b"host",
    b"connection",
    b"transfer-encoding",
    b"content-length",
    b"cookie",
    b":status",
    b":path",
    b":unknown",
    b"X-Upper",
    b"x-\xff",
    b"",
    b"x-bin",
    b"x\n",
)


# Large windows: the client reads everything without window updates.
_WINDOW = 1 << 30
_START = (
    wire.PREFACE
    + wire.settings((wire.INITIAL_WINDOW_SIZE, _WINDOW))
    + wire.frame(wire.WINDOW_UPDATE, payload=struct.pack(">I", _WINDOW))
)


@dataclass(frozen=True)
class Case:
    """Describes what one connection sends.

    pieces: written one after the other. streams: valid calls, each of which must end; 0 where something on the
    connection
    is invalid. ends_by_reset: whether the client resets the TCP connection instead of closing it.
    """

    kinds: tuple[str, ...]
    pieces: tuple[bytes, ...]
    streams: int
    ends_by_reset: bool


class Cases:
    """Makes cases by number, equal for equal seeds. authorization: sent with some of the calls."""

    def __init__(self, seed: int, authorization: bytes | None = None) -> None:
        self._seed = seed
        self._authorization = authorization

    def case(self, number: int) -> Case:
        """The case of this number."""
        return _Maker(Random(f"{self._seed}-{number}"), self._authorization).case()


class _Maker:
    """Makes one case."""

    def __init__(self, random: Random, authorization: bytes | None) -> None:
        self._random = random
        self._authorization = authorization
        self._encoder = Encoder()
        self._stream = 1

    def case(self) -> Case:
        random = self._random
        if random.random() < 0.06:
            return Case(("preface",), (self._preface(),), 0, False)
        allowed = _SOUND if random.random() < 0.5 else tuple(_KINDS)
        kinds = random.choices(allowed, [_KINDS[kind][0] for kind in allowed], k=random.randint(1, 5))
        parts = [_START]
        parts += [_KINDS[kind][1](self) for kind in kinds]
        streams = len(kinds) if all(kind in _WHOLE for kind in kinds) else 0
        if random.random() < 0.15:
            kinds, streams = [*kinds, "mutated"], 0
            parts = [self._mutated(b"".join(parts))]
        if random.random() < 0.1:
            kinds, streams = [*kinds, "cut"], 0
            data = b"".join(parts)
            parts = [data[: random.randrange(len(data))]]
        return Case(tuple(kinds), tuple(self._split(parts)), streams, random.random() < 0.1)

    # Parts of a connection

    def call(self) -> bytes:
        """Makes a call with some headers and a body that no library sends."""
        random, stream = self._random, self._next_stream()
        body = self._body()
        flags = wire.END_HEADERS | (wire.END_STREAM if body is None else 0)
        out = wire.frame(wire.HEADERS, flags, stream, self._block())
        if body is not None:
            end = 0 if random.random() < 0.15 else wire.END_STREAM
            out += self._data(stream, body, end)
        return out

    def good_call(self) -> bytes:
        """Makes a valid call with Huffman codes and indexed headers."""
        stream = self._next_stream()
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", self._random.choice(ENDING)),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *self._credentials(),
        ]
        block = self._encoder.encode(headers, huffman=self._random.random() < 0.5)
        return wire.call(block, wire.message(b""), stream)

    def padded(self) -> bytes:
        """Makes a call with padded frames, which gRPC's C core refuses, priorities, and continued headers."""
        random, stream = self._random, self._next_stream()
        block = wire.headers(random.choice(ENDING), self._credentials())
        cut = random.randrange(len(block))
        pad = random.randrange(256)
        first = bytes((pad,)) + struct.pack(">IB", random.getrandbits(32), random.randrange(256)) + block[:cut]
        flags = wire.PADDED | wire.PRIORITIZED
        out = wire.frame(wire.HEADERS, flags, stream, first + bytes(pad))
        out += wire.frame(wire.CONTINUATION, wire.END_HEADERS, stream, block[cut:])
        data = wire.message(b"")
        return out + wire.frame(wire.DATA, wire.END_STREAM | wire.PADDED, stream, bytes((pad,)) + data + bytes(pad))

    def random_block(self) -> bytes:
        """Makes a header block of random bytes, or with invalid HPACK."""
        random, stream = self._random, self._next_stream()
        block = random.choice(
            (
                random.randbytes(random.randrange(200)),
                b"\x7f" + b"\xff" * random.randrange(1, 30) + b"\x01",
                b"\x3f\xe1\xff\x03" + wire.headers(random.choice(PATHS)),
                b"\x20" * random.randrange(1, 300) + wire.headers(random.choice(PATHS)),
                b"\xbe" * random.randrange(1, 4000),
                b"\x40\x01a\x7f\xff\xff\xff\xff\x0f",
                wire.headers(random.choice(PATHS)) + b"\x82" * random.randrange(1, 2000),
                b"\x40\x04blob\x7f\x80\x1f" + b"z" * 4000 + b"\xbe" * random.randrange(1, 3000),
                b"\x00\x85" + random.randbytes(5) + b"\x85" + random.randbytes(5),
            )
        )
        return wire.frame(wire.HEADERS, wire.END_HEADERS | random.choice((0, wire.END_STREAM)), stream, block[:16000])

    def random_frame(self) -> bytes:
        """Makes frames of any type, flags, stream and payload."""
        random = self._random
        out = b""
        for _ in range(random.randint(1, 8)):
            kind = random.choice((*range(10), random.randrange(256)))
            stream = random.choice((0, 1, 2, 3, self._stream, 0x7FFFFFFF, random.getrandbits(31)))
            size = random.choice((0, 1, 4, 5, 6, 8, 9, random.randrange(100)))
            out += wire.frame(kind, random.randrange(256), stream, random.randbytes(size))
        return out

    def wrong_length(self) -> bytes:
        """Makes a frame with a wrong length."""
        random = self._random
        length = random.choice((1, 0xFFFF, 0xFFFFFF, random.randrange(1 << 24)))
        return length.to_bytes(3, "big") + wire.frame(random.randrange(10), 0, 1, random.randbytes(20))[3:]

    def settings(self) -> bytes:
        """Makes SETTINGS with any values."""
        random = self._random
        values = (0, 1, 16384, 65535, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
        pairs = [
            (random.choice((*range(9), 0xFE03, 0xFFFF)), random.choice(values)) for _ in range(random.randint(1, 9))
        ]
        return random.choice((1, 1, 1, 40)) * wire.settings(*pairs)

    def flood(self) -> bytes:
        """Makes many frames of one type."""
        random = self._random
        stream = self._next_stream()
        block = wire.headers(random.choice(PATHS), self._credentials())
        opened = wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block)
        more = wire.frame(wire.CONTINUATION, 0, stream, wire.literal(b"more", SECRET * random.randrange(9)))
        kind, data = random.choice(
            (
                (b"", wire.frame(wire.PING, payload=random.randbytes(8))),
                (b"", wire.settings()),
                (b"", wire.frame(wire.SETTINGS, wire.ACK)),
                (b"", wire.frame(wire.PRIORITY, 0, stream, random.randbytes(5))),
                (opened, wire.frame(wire.DATA, 0, stream)),
                (opened, wire.frame(wire.WINDOW_UPDATE, 0, stream, b"\x00\x00\x00\x01")),
                (opened, wire.frame(wire.RST_STREAM, 0, stream, random.randbytes(4))),
                (wire.frame(wire.HEADERS, 0, stream, block), more),
            )
        )
        return kind + data * random.choice((10, 100, 1000))

    def resets(self) -> bytes:
        """Starts calls and resets them at once."""
        out = b""
        block = wire.headers(self._random.choice(PATHS), self._credentials())
        for _ in range(self._random.choice((3, 30, 150))):
            stream = self._next_stream()
            out += wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block)
            out += wire.frame(wire.RST_STREAM, 0, stream, wire.CANCEL.to_bytes(4, "big"))
        return out

    def half_closed(self) -> bytes:
        """Makes frames on streams that are closed, half closed, unknown or the server's."""
        random, stream = self._random, self._next_stream()
        block = wire.headers(random.choice(PATHS), self._credentials())
        out, trailer = wire.call(block, wire.message(b""), stream), wire.literal(b"x-trailer", SECRET)
        for _ in range(random.randint(1, 4)):
            on = random.choice((stream, stream, max(1, stream - 2), stream + 1, 2))
            out += random.choice(
                (
                    wire.frame(wire.DATA, random.choice((0, wire.END_STREAM)), on, wire.message(SECRET)),
                    wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, on, trailer),
                    wire.frame(wire.HEADERS, wire.END_HEADERS, on, block),
                    wire.frame(wire.RST_STREAM, 0, on, random.randbytes(4)),
                    wire.frame(wire.WINDOW_UPDATE, 0, on, random.randbytes(4)),
                )
            )
        return out

    def windows(self) -> bytes:
        """Makes window sizes that are zero, tiny, or too large."""
        random = self._random
        sizes = (0, 1, 5, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
        out = wire.settings((wire.INITIAL_WINDOW_SIZE, random.choice(sizes))) + self.good_call()
        for _ in range(random.randint(0, 5)):
            more = struct.pack(">I", random.choice(sizes))
            out += wire.frame(wire.WINDOW_UPDATE, 0, random.choice((0, 1, self._stream)), more)
        return out + wire.settings((wire.INITIAL_WINDOW_SIZE, random.choice(sizes)))

    def goaway(self) -> bytes:
        """Sends GOAWAY with text that would forge lines of a log."""
        random = self._random
        text = random.choice((FORGED, SECRET, random.randbytes(50), b"too_many_pings", FORGED * 200))
        last, code = random.getrandbits(31), random.choice((0, 2, 11, 2**32 - 1))
        return wire.frame(wire.GOAWAY, payload=struct.pack(">II", last, code) + text)

    def unfinished(self) -> bytes:
        """Sends a message with a large declared length and no content."""
        random, stream = self._random, self._next_stream()
        out = wire.frame(
            wire.HEADERS, wire.END_HEADERS, stream, wire.headers(random.choice(PATHS), self._credentials())
        )
        size = random.choice((1, 1 << 20, 60 << 20, 2**32 - 1))
        return out + wire.frame(wire.DATA, 0, stream, b"\x00" + struct.pack(">I", size) + random.randbytes(1000))

    # Pieces of these parts

    def _next_stream(self) -> int:
        self._stream += 2
        return self._stream - 2

    def _credentials(self) -> list[wire.Header]:
        if self._authorization is None or self._random.random() < 0.4:
            return []
        value = self._authorization if self._random.random() < 0.8 else b"Bearer " + SECRET
        return [(b"authorization", value)]

    def _block(self) -> bytes:
        random = self._random
        path = random.choice(PATHS)
        if random.random() < 0.3:
            path = random.choice((b"/a/b", b"", b"/", b"*", b"/\xff/x", path + b"\x00", path.upper(), SECRET, FORGED))
        replaced: dict[str, bytes | None] = {}
        if random.random() < 0.2:
            replaced["method"] = random.choice((b"GET", b"PUT", b"CONNECT", b"\xff", b"", None))
        if random.random() < 0.2:
            replaced["authority"] = random.choice((b"\xff", b"", b"a" * 500, FORGED, None))
        if random.random() < 0.3:
            replaced["content_type"] = random.choice((*_TYPES, None))
        if random.random() < 0.1:
            replaced["te"] = random.choice((b"gzip", b"", None))
        if random.random() < 0.1:
            replaced["scheme"] = random.choice((b"https", b"ftp", b"\xff", None))
        more = self._credentials()
        if random.random() < 0.4:
            more.append((b"grpc-timeout", random.choice(TIMEOUTS)))
        for _ in range(random.choice((0, 0, 1, 3))):
            values = (
                SECRET,
                FORGED,
                SECRET + b"\xff\xfe",
                b"\x00",
                b"a" * random.randrange(9000),
                random.randbytes(20),
            )
            more.append((random.choice((*_NAMES, random.randbytes(4))), random.choice(values)))
        random.shuffle(more)
        return wire.headers(path, more, **replaced)

    def _body(self) -> bytes | None:
        random = self._random
        good = raw.request(raw.sign_graph()).SerializeToString()
        return random.choice(
            (
                None,
                wire.message(b""),
                wire.message(good),
                wire.message(random.randbytes(random.randrange(300))),
                wire.message(b"") * random.randrange(1, 30),
                random.randbytes(random.randrange(60)),
                b"\x01" + struct.pack(">I", 10) + random.randbytes(10),
                bytes((random.randrange(256),)) + struct.pack(">I", random.getrandbits(32)) + random.randbytes(30),
            )
        )

    def _data(self, stream: int, body: bytes, end: int) -> bytes:
        """Makes a body of one or several frames."""
        cut = self._random.randrange(len(body) + 1)
        if self._random.random() < 0.7:
            return wire.frame(wire.DATA, end, stream, body)
        return wire.frame(wire.DATA, 0, stream, body[:cut]) + wire.frame(wire.DATA, end, stream, body[cut:])

    def _preface(self) -> bytes:
        random = self._random
        return random.choice(
            (
                b"",
                random.randbytes(random.randrange(1, 3000)),
                wire.PREFACE[: random.randrange(len(wire.PREFACE))],
                wire.PREFACE.replace(b"SM", b"SN") + wire.settings(),
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                b"POST " + PATHS[0] + b" HTTP/1.1\r\nUpgrade: h2c\r\n\r\n" + FORGED,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(300),
                wire.PREFACE + wire.frame(wire.PING, payload=bytes(8)) * 20,
                wire.settings() + wire.PREFACE,
            )
        )

    def _mutated(self, data: bytes) -> bytes:
        random = self._random
        changed = bytearray(data)
        for _ in range(random.randint(1, 6)):
            at = random.randrange(len(wire.PREFACE), len(changed) or 1) if len(changed) > 30 else 0
            match random.randrange(4):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << random.randrange(8)
                case 1:
                    del changed[at : at + random.randrange(1, 12)]
                case 2:
                    changed[at:at] = random.randbytes(random.randrange(1, 12))
                case _:
                    changed[at:at] = changed[at : at + random.randrange(1, 200)]
        return bytes(changed)

    def _split(self, parts: Sequence[bytes]) -> list[bytes]:
        """Splits bytes as TCP may."""
        data = b"".join(parts)
        if self._random.random() < 0.8:
            return [data]
        cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(3))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


_KINDS: Mapping[str, tuple[int, Callable[[_Maker], bytes]]] = {
    "call": (8, _Maker.call),
    "good_call": (2, _Maker.good_call),
    "padded": (2, _Maker.padded),
    "random_block": (3, _Maker.random_block),
    "random_frame": (3, _Maker.random_frame),
    "wrong_length": (1, _Maker.wrong_length),
    "settings": (2, _Maker.settings),
    "flood": (2, _Maker.flood),
    "resets": (1, _Maker.resets),
    "half_closed": (2, _Maker.half_closed),
    "windows": (2, _Maker.windows),
    "goaway": (2, _Maker.goaway),
    "unfinished": (1, _Maker.unfinished),
}
_WHOLE = {"good_call"}
# After these the connection mostly stays open, so that the next bytes are read.
_SOUND = ("call", "good_call", "flood", "resets", "goaway", "unfinished")
