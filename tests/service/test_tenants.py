"""Two tenants of one server: names, blobs, variables and quotas of one do not affect the other."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import blob_pb2, blob_pb2_grpc, evaluate_pb2, rule_pb2
from tests.service import raw
from tests.service.answers import assert_close, provokes, refused, refused_raw
from tests.service.graph_defs import SIGN_FEEDS, sign_graph
from tests.service.guarded import Guarded
from tests.service.streams import error_reason, open_stream
from tests.waiting import wait_until

WORDS: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"]}


def gradient(client: gr.Client, rule: Any) -> list[float]:
    found: list[float] = (
        client.evaluate(sign_graph(), feeds=SIGN_FEEDS, overrides={"Sign": rule}, **WORDS).gradients["x"].tolist()
    )
    return found


# Rules.


def test_tenants_may_have_rules_of_the_same_name(ada: gr.Client, grace: gr.Client) -> None:
    ada.create_rule("Mine", "3 * dy")
    grace.create_rule("Mine", "5 * dy")
    assert (gradient(ada, "Mine"), gradient(grace, "Mine")) == ([3.0, 3.0], [5.0, 5.0])
    assert (gradient(ada, "ste"), gradient(grace, "ste")) == ([1.0, 1.0], [1.0, 1.0])
    ada.delete_rule("Mine")
    assert gradient(grace, "Mine") == [5.0, 5.0]
    with refused("UNKNOWN_RULE"):
        gradient(ada, "Mine")


def test_rules_of_another_tenant_are_unknown(ada: gr.Client, grace: gr.Client) -> None:
    before = refusals_of_rules(grace, "Secret")
    ada.create_rule("Secret", "3 * dy", description="ada's")
    ada.create_rule("Secrets", "4 * dy")
    # The error is word for word that of a rule that never existed.
    assert refusals_of_rules(grace, "Secret") == before
    assert grace.list_rules("user") == []
    assert not [rule for rule in grace.list_rules() if "Secret" in rule.name]
    # Not even the use of the name is revealed.
    grace.create_rule("Secret", "5 * dy")
    assert [rule.name for rule in ada.list_rules("user")] == ["Secret", "Secrets"]
    assert ada.get_rule("Secret").description == "ada's"


def refusals_of_rules(client: gr.Client, name: str) -> list[str]:
    said = []
    for call in (
        lambda: client.get_rule(name),
        lambda: client.delete_rule(name),
        lambda: client.sample_rule(name, x=[1.0], dy=[1.0]),
        lambda: gradient(client, name),
        lambda: client.compile(sign_graph(), overrides={"Sign": name}, name="p", **WORDS),
    ):
        with refused("UNKNOWN_RULE") as refusal:
            call()
        said.append(refusal.message)
    return said


def test_builtin_rules_are_shared_and_immutable(ada: gr.Client, grace: gr.Client) -> None:
    shipped = [[(rule.name, rule.digest) for rule in client.list_rules("builtin")] for client in (ada, grace)]
    assert shipped[0] == shipped[1] != []
    for client in (ada, grace):
        with refused("RULE_READ_ONLY"):
            client.delete_rule("ste")


def test_unreadable_row_affects_only_its_rule(
    guarded: Guarded, ada: gr.Client, grace: gr.Client, names: tuple[str, str]
) -> None:
    # Damage a row as a disk fault would, before the tenant's first call.
    with sqlite3.connect(guarded.running.data_dir / "registry" / "gradrule.db") as database:
        query = "INSERT INTO rules VALUES (?, ?, ?, ?, 1)"
        database.execute(query, (names[0], "Broken", b"\xff\xff", ""))
        database.execute(query, (names[0], "no name!", b"", ""))
        database.execute("INSERT INTO blobs VALUES (?, 'no digest', x'00')", (names[0],))
        database.execute("INSERT INTO programs VALUES (?, 'p', 'i', 'no digest', x'ff', x'', x'ff', 1)", (names[0],))
    database.close()
    assert gradient(ada, "ste") == [1.0, 1.0]
    assert (ada.list_rules("user"), ada.list_programs()) == ([], [])
    with refused("UNKNOWN_RULE") as refusal:
        gradient(ada, "Broken")
    refusal.says("cannot be read", "create it again")
    with refused("PROGRAM_NOT_FOUND") as refusal:
        ada.program("p").evaluate(SIGN_FEEDS)
    refusal.says("cannot be read", "compile it again")
    ada.create_rule("Broken", "3 * dy")
    assert gradient(ada, "Broken") == [3.0, 3.0]
    program = ada.compile(sign_graph(), overrides={"Sign": "Broken"}, name="p", **WORDS)
    assert program.evaluate(SIGN_FEEDS).gradients["x"].tolist() == [3.0, 3.0]
    with refused("UNKNOWN_RULE") as refusal:
        gradient(grace, "Broken")
    assert "cannot be read" not in refusal.message


# Programs.


def test_tenants_may_have_programs_of_the_same_name(ada: gr.Client, grace: gr.Client) -> None:
    ada.create_rule("Mine", "3 * dy")
    grace.create_rule("Mine", "5 * dy")
    programs = [
        client.compile(sign_graph(), overrides={"Sign": "Mine"}, name="model", **WORDS) for client in (ada, grace)
    ]
    assert [p.evaluate(SIGN_FEEDS).gradients["x"].tolist() for p in programs] == [[3.0, 3.0], [5.0, 5.0]]
    ada.delete_program("model")
    with refused("PROGRAM_NOT_FOUND"):
        programs[0].evaluate(SIGN_FEEDS)
    assert programs[1].evaluate(SIGN_FEEDS).gradients["x"].tolist() == [5.0, 5.0]
    assert [p.name for p in grace.list_programs()] == ["programs/model"]
    assert ada.list_programs() == []


def test_program_names_by_content_reveal_nothing(
    ada: gr.Client, grace: gr.Client, names: tuple[str, str], channels: Any
) -> None:
    graph = gr.Graph()
    graph.op("Sign", graph.placeholder("x", "float32", [7]), name="y")
    name = ada.compile(graph, **WORDS).name
    for call in (grace.program, grace.delete_program):
        with refused("PROGRAM_NOT_FOUND") as refusal:
            call(name)
        assert "did you mean" not in refusal.message
    request = evaluate_pb2.EvaluateRequest(program=name, feeds=raw.feeds({"x": raw.tensor([1.0] * 7)}))
    with refused_raw("PROGRAM_NOT_FOUND"):
        raw.evaluate(channels(names[1]), request)
    assert raw.evaluate(channels(names[0]), request).outputs
    # A tenant with the same content gets the same name and a program of its own.
    mine = grace.compile(graph, **WORDS)
    assert mine.name == name
    ada.delete_program(name)
    assert mine.evaluate({"x": np.ones(7, np.float32)}).outputs["y"].tolist() == [1.0] * 7


def test_compile_time_reveals_no_program_of_another_tenant(ada: gr.Client, grace: gr.Client) -> None:
    """A program compiled by one tenant is compiled again for another: its time reveals nothing."""
    graph = gr.Graph()
    graph.op("Sign", graph.placeholder("x", "float32", [9]), name="y")
    feeds = {"x": np.ones(9, np.float32)}
    first, again = (ada.evaluate(graph, feeds=feeds, fetches=["y"]).timings.compile for _ in range(2))
    other = grace.evaluate(graph, feeds=feeds, fetches=["y"]).timings.compile
    assert again == 0 < min(first, other)


# Blobs.


def test_hash_does_not_give_access_to_another_tenants_blob(
    ada: gr.Client, grace: gr.Client, names: tuple[str, str], channels: Any
) -> None:
    blob = gr.Blob(np.arange(2048, dtype=np.float32))
    graph = gr.Graph()
    graph.op("Neg", graph.placeholder("x", "float32", [2048]), name="y")
    assert ada.evaluate(graph, feeds={"x": blob}, fetches=["y"]).outputs["y"][3] == -3.0
    assert ada.find_missing_blobs([blob.sha256]) == []
    assert grace.find_missing_blobs([blob.sha256]) == [blob.sha256]
    request = evaluate_pb2.EvaluateRequest()
    request.spec.fetches.append("y")
    request.spec.graph.serialized = graph.to_bytes()
    request.feeds.add(name="x", value=blob.source())
    with refused_raw("BLOB_NOT_FOUND"):
        raw.evaluate(channels(names[1]), request)
    assert raw.evaluate(channels(names[0]), request).outputs


def test_loaded_weights_are_not_shared_between_tenants(ada: gr.Client, names: tuple[str, str], channels: Any) -> None:
    weights = np.arange(2000, dtype=np.float32)
    graph = gr.Graph()
    graph.op("Mul", graph.placeholder("x", "float32", []), graph.variable("w", weights), name="y")
    program = ada.compile(graph, fetches=["y"], name="weighted")
    assert program.evaluate({"x": 2.0}).outputs["y"][5] == 10.0
    request = evaluate_pb2.EvaluateRequest(feeds=raw.feeds({"x": raw.tensor(2.0)}))
    request.spec.fetches.append("y")
    request.spec.graph.serialized = graph.to_bytes()
    request.spec.variables.add(name="w", value=gr.Blob(weights).source())
    with refused_raw("BLOB_NOT_FOUND"):
        raw.evaluate(channels(names[1]), request)


# State in engines.


def counter() -> gr.Graph:
    """Makes loss = sum(w) of a variable whose shared name all tenants use."""
    g = gr.Graph()
    g.op("Sum", g.variable("w", np.ones(2, np.float32)), g.constant([0]), name="loss")
    return g


def test_variables_of_one_name_are_separate_per_session(ada: gr.Client, grace: gr.Client) -> None:
    with ada.session(counter()) as first, grace.session(counter()) as second:
        for _ in range(3):
            first.step({}, "loss", gr.optimizers.SGD(1.0))
            second.step({}, "loss", gr.optimizers.SGD(10.0))
        assert_close(first.read()["w"], np.float32([-2, -2]))
        assert_close(second.read()["w"], np.float32([-29, -29]))


def test_handle_of_another_tenant_is_unknown(ada: gr.Client, names: tuple[str, str], channels: Any) -> None:
    name = ada.compile(sign_graph(), **WORDS, overrides={"Sign": "ste"}).name
    request = evaluate_pb2.EvaluateRequest(program=name, feeds=raw.feeds({"x": raw.tensor(SIGN_FEEDS["x"])}))
    with open_stream(channels(names[0])) as owner, open_stream(channels(names[1])) as thief:
        owner.send(1, forward=evaluate_pb2.ForwardRequest(evaluate=request))
        pull_back = evaluate_pb2.PullBackRequest(handle=owner.receive().forward.handle)
        thief.send(1, pull_back=pull_back)
        assert error_reason(thief.receive()) == "HANDLE_EXPIRED"
        thief.send(2, close_handle=evaluate_pb2.CloseHandleRequest(handle=pull_back.handle))
        thief.receive()
        thief.send(3, forward=evaluate_pb2.ForwardRequest(evaluate=request))
        assert error_reason(thief.receive()) == "PROGRAM_NOT_FOUND"
        owner.send(2, pull_back=pull_back)
        assert error_reason(owner.receive()) == ""


def test_tenant_comes_from_the_credential_alone(guarded: Guarded, ada: gr.Client, names: tuple[str, str]) -> None:
    ada.create_rule("Mine", "3 * dy")
    tenants = {name: f"Bearer {guarded.web_token(name)}" for name in (names[0], "nobody in particular")}
    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        method: Any = channel.unary_unary("/gradrule.v1.RuleService/ListRules")
        request = rule_pb2.ListRulesRequest(kind=rule_pb2.RULE_KIND_USER).SerializeToString()

        def rules(credential: str, *more: tuple[str, str]) -> list[str]:
            answer = method(request, metadata=[("authorization", tenants[credential]), *more], timeout=20)
            return [rule.name for rule in rule_pb2.ListRulesResponse.FromString(answer).rules]

        assert rules(names[0]) == ["rules/Mine"]
        for key in ("tenant", "x-tenant", "x-forwarded-user", "x-gradrule-tenant"):
            assert rules("nobody in particular", (key, names[0])) == []


# Quotas.


@provokes("QUOTA_EXCEEDED")
def test_number_of_rules_and_programs_is_limited(ada: gr.Client, grace: gr.Client) -> None:
    for number in range(5):
        ada.create_rule(f"r{number}", f"{number + 2} * dy")
    with refused("QUOTA_EXCEEDED") as refusal:
        ada.create_rule("more", "9 * dy")
    refusal.says("--tenant-rules", "5")
    # Registering an existing rule or program again adds none.
    ada.create_rule("r1", "3 * dy")
    for number in range(4):
        ada.compile(sign_graph(), name=f"p{number}", **WORDS)
    with refused("QUOTA_EXCEEDED") as refusal:
        ada.compile(sign_graph(), name="more", **WORDS)
    refusal.says("--tenant-programs", "4")
    grace.create_rule("mine", "9 * dy")
    grace.compile(sign_graph(), name="p", **WORDS)
    ada.delete_rule("r0")
    ada.delete_program("p0")
    ada.create_rule("more", "9 * dy")
    ada.compile(sign_graph(), name="more", **WORDS)


def heavy(number: int) -> gr.Graph:
    """Makes a graph of 60 KB."""
    graph = gr.Graph()
    weights = graph.constant(np.arange(15_000, dtype=np.float32) + number)
    graph.op("Mul", graph.placeholder("x", "float32", [15_000]), weights, name="y")
    return graph


def test_bytes_of_rules_and_programs_are_limited(ada: gr.Client, grace: gr.Client) -> None:
    ada.compile(heavy(0), name="first", **WORDS)
    with refused("QUOTA_EXCEEDED") as refusal:
        ada.compile(heavy(1), name="second", **WORDS)
    refusal.says("--tenant-registry-bytes", "100000")
    # The graph is stored already.
    ada.compile(heavy(0), name="again", **WORDS)
    grace.compile(heavy(1), name="second", **WORDS)
    ada.delete_program("first")
    ada.delete_program("again")
    ada.compile(heavy(1), name="second", **WORDS)
    for number in range(4):
        ada.create_rule(f"r{number}", f"{number + 2} * dy", description="d" * 8192)
    with refused("QUOTA_EXCEEDED") as refusal:
        ada.create_rule("more", "9 * dy", description="d" * 8192)
    refusal.says("--tenant-registry-bytes")
    with refused("LIMIT_EXCEEDED") as refusal:
        grace.create_rule("long", "9 * dy", description="d" * 8193)
    refusal.says("description", "8192")


def test_number_and_bytes_of_sessions_are_limited(ada: gr.Client, grace: gr.Client) -> None:
    with ada.session(counter()), ada.session(counter()):
        with refused("QUOTA_EXCEEDED") as refusal:
            ada.session(counter()).__enter__()
        refusal.says("--tenant-sessions")
        with grace.session(counter()) as other:
            assert_close(other.read()["w"], np.ones(2, np.float32))
    large = gr.Graph()
    large.op("Sum", large.variable("w", np.ones(2000, np.float32)), large.constant([0]), name="loss")
    with refused("QUOTA_EXCEEDED") as refusal:
        grace.session(large).__enter__()
    refusal.says("--tenant-session-bytes")


def test_number_and_bytes_of_handles_are_limited(ada: gr.Client, grace: gr.Client) -> None:
    square = gr.Graph()
    x = square.placeholder("x", "float32", [None])
    square.op("Mul", x, x, name="y")
    programs = [client.compile(square, **WORDS) for client in (ada, grace)]
    handles = [programs[0].forward({"x": [1.0]}) for _ in range(3)]
    with refused("QUOTA_EXCEEDED") as refusal:
        programs[0].forward({"x": [1.0]})
    refusal.says("--tenant-handles")
    programs[1].forward({"x": [1.0]}).close()
    for handle in handles:
        handle.close()
    with refused("QUOTA_EXCEEDED") as refusal:
        programs[1].forward({"x": np.ones(400_000, np.float32)})
    refusal.says("--tenant-handle-bytes")


def test_bytes_of_blobs_are_limited(ada: gr.Client, grace: gr.Client) -> None:
    with refused("QUOTA_EXCEEDED") as refusal:
        ada.upload(bytes(100_001))
    refusal.says("--tenant-blob-bytes")
    # The refused upload leaves nothing, and unused blobs are evicted.
    names = [ada.upload(bytes([number]) * 60_000) for number in range(2)]
    assert ada.find_missing_blobs(names) == names[:1]
    assert grace.find_missing_blobs([grace.upload(b"small")]) == []


def test_number_of_streams_is_limited(channels: Any) -> None:
    ada, grace = channels("ada of streams"), channels("grace of streams")
    request = raw.request(raw.sign_graph())
    with ExitStack() as stack:
        for _ in range(8):
            stream = stack.enter_context(open_stream(ada))
            stream.send(1, evaluate=request)
            assert error_reason(stream.receive()) == ""
        with open_stream(ada) as ninth, refused_raw("QUOTA_EXCEEDED") as refusal:
            ninth.send(1, evaluate=request)
            ninth.receive()
        refusal.says("--tenant-streams")
        with open_stream(grace) as other:
            other.send(1, evaluate=request)
            assert error_reason(other.receive()) == ""
    assert wait_until(lambda: can_open_a_stream(ada, request) or None, "room for a stream")


def can_open_a_stream(channel: grpc.Channel, request: Any) -> bool:
    with open_stream(channel) as stream:
        stream.send(1, evaluate=request)
        try:
            return error_reason(stream.receive()) == ""
        except grpc.RpcError:
            return False


def test_unread_stream_is_closed(guarded: Guarded, channels: Any) -> None:
    graph = raw.graph(raw.placeholder(), raw.node("y", "Neg", "x"))
    request = raw.request(graph, {"x": raw.tensor(np.ones(1_000_000, np.float32))})
    channel = channels("who does not read")
    with open_stream(channel) as stream:
        for number in range(1, 9):
            stream.send(number, evaluate=request)
        wait_until(lambda: "was not read within" in guarded.running.log.read_text() or None, "the end of the stream")
        # Most answers were never written.
        with refused_raw("DEADLINE_EXCEEDED") as refusal:
            for _ in range(4):
                stream.receive()
        refusal.says("--stall-s")
    # The server closes the connection some seconds after the stream.
    closed = threading.Event()
    channel.subscribe(lambda state: closed.set() if state is grpc.ChannelConnectivity.IDLE else None)
    assert closed.wait(60)
    with open_stream(channels("who reads")) as stream:
        stream.send(1, evaluate=request)
        assert error_reason(stream.receive()) == ""


# Overload of one tenant.


def slow() -> gr.Graph:
    """Makes a graph that occupies an engine thread for about 0.2 s."""
    g = gr.Graph()
    y = g.placeholder("x", "float32", [600, 600])
    for _ in range(12):
        y = g.op("MatMul", y, y)
    g.op("Sum", y, g.constant([0, 1]), name="y")
    return g


@provokes("OVERLOADED")
def test_overload_of_one_tenant_refuses_no_other(guarded: Guarded) -> None:
    feeds = {"x": np.eye(600, dtype=np.float32)}
    with guarded.connect("greedy") as greedy, guarded.connect("modest") as modest:
        greedy.evaluate(slow(), feeds=feeds, fetches=["y"])
        modest.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"])

        def ask() -> gr.errors.OverloadedError | None:
            try:
                greedy.evaluate(slow(), feeds=feeds, fetches=["y"], timeout=60)
            except gr.errors.OverloadedError as refusal:
                return refusal
            return None

        with futures.ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(ask) for _ in range(60)]
            answers = 0
            while not all(one.done() for one in asked):
                modest.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"])
                answers += 1
        refusals = [found for one in asked if (found := one.result()) is not None]
        assert 12 <= 60 - len(refusals) < 60
        with refused("OVERLOADED") as refusal:
            raise refusals[0]
        refusal.says("--tenant-requests")
        assert refusal.error.retry_delay == pytest.approx(0.2)
        assert answers > 3


def test_upload_under_another_tenants_hash_is_verified(channels: Any) -> None:
    """An upload under a hash that another tenant has filled is checked like any other."""
    data = b"what ada has"
    name = hashlib.sha256(data).hexdigest()
    stubs = [blob_pb2_grpc.BlobServiceStub(channels(f"{tenant} of bytes")) for tenant in ("ada", "grace")]
    stubs[0].UploadBlob(iter([blob_pb2.UploadBlobRequest(sha256=name, data=data)]))
    with refused_raw("BLOB_MISMATCH"):
        stubs[1].UploadBlob(iter([blob_pb2.UploadBlobRequest(sha256=name, data=b"what grace has")]))
    with refused_raw("BLOB_MISMATCH"):
        stubs[1].UploadBlob(iter([blob_pb2.UploadBlobRequest(sha256=name)]))
