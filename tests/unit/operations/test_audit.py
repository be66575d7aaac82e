"""Tests what the audit log writes, and where."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import blob_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.operations import audit
from gradrule_server.operations.audit import AuditLog, record_registration
from gradrule_server.operations.log_writing import LineHandler, RateLimiter
from gradrule_server.operations.request_record import Observer
from tests.unit.operations.records import make, peer, refusal


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "audit.jsonl"
    audit.configure(str(path))
    yield path
    audit.configure("")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(rpc: str, request: Any, answer: Any, log: AuditLog) -> None:
    make(log, rpc=rpc, tenant="ada", within=lambda _: record_registration(request, answer))


RULE = rule_pb2.Rule(name="rules/Q", digest="d1")
PROGRAM = program_pb2.Program(name="programs/p")
PROGRAM.digests.program = "d2"
SHA = "0" * 64


MADE = (
    ("RuleService/CreateRule", rule_pb2.CreateRuleRequest(), rule_pb2.CreateRuleResponse(rule=RULE)),
    ("RuleService/DeleteRule", rule_pb2.DeleteRuleRequest(name="Q"), rule_pb2.DeleteRuleResponse()),
    (
        "ProgramService/CompileProgram",
        program_pb2.CompileProgramRequest(),
        program_pb2.CompileProgramResponse(program=PROGRAM),
    ),
    (
        "ProgramService/DeleteProgram",
        program_pb2.DeleteProgramRequest(name="programs/p"),
        program_pb2.DeleteProgramResponse(),
    ),
    ("BlobService/UploadBlob", blob_pb2.UploadBlobRequest(), blob_pb2.UploadBlobResponse(sha256=SHA, size_bytes=1)),
)
REPORTED = (
    ("create", "rule", "rules/Q", "d1"),
    ("delete", "rule", "rules/Q", None),
    ("create", "program", "programs/p", "d2"),
    ("delete", "program", "programs/p", None),
    ("create", "blob", SHA, SHA),
)


@pytest.mark.parametrize(("made", "what"), list(zip(MADE, REPORTED, strict=True)), ids=[rpc for rpc, *_ in MADE])
def test_each_registration_is_a_line(file: Path, made: tuple[str, Any, Any], what: tuple[str, ...]) -> None:
    rpc, request, answer = made
    answered(rpc, request, answer, AuditLog())
    (line,) = lines(file)
    assert (line["action"], line["kind"], line["name"], line.get("digest")) == what
    assert (line["event"], line["tenant"], line["rpc"], line["peer"]) == ("registration", "ada", rpc, peer())
    assert line["request_id"]


def test_validating_and_reading_write_no_registration(file: Path) -> None:
    log = AuditLog()
    checking = program_pb2.CompileProgramRequest(validate_only=True)
    # A program that is not kept has no name.
    checked = program_pb2.Program(digests=PROGRAM.digests)
    answered("ProgramService/CompileProgram", checking, program_pb2.CompileProgramResponse(program=checked), log)
    answered("RuleService/GetRule", rule_pb2.GetRuleRequest(), rule_pb2.GetRuleResponse(rule=RULE), log)
    make(log, fails=refusal("UNKNOWN_RULE"))
    assert lines(file) == []


@pytest.mark.parametrize("reason", sorted(audit.REFUSALS))
def test_each_refusal_is_a_line(file: Path, reason: str) -> None:
    make(AuditLog(), fails=refusal(reason, "because\n"), tenant="bob")
    (line,) = lines(file)
    assert (line["event"], line["reason"], line["detail"], line["tenant"]) == ("refusal", reason, "because\n", "bob")


def test_unauthenticated_callers_have_a_limit_of_their_own(file: Path) -> None:
    log = AuditLog()
    for _ in range(150):
        make(log, fails=refusal("UNAUTHENTICATED"), tenant=None)
    strangers = lines(file)
    assert 100 <= len(strangers) < 150
    assert not any("tenant" in line for line in strangers)
    make(log, fails=refusal("PERMISSION_DENIED"), tenant="default")
    log.log_quarantine("0f1e2d: signal 6, twice")
    assert [line["event"] for line in lines(file)[len(strangers) :]] == ["refusal", "quarantine"]


def test_refusal_within_a_stream_is_one_line(file: Path) -> None:
    observer, cause = Observer([AuditLog()]), refusal("QUOTA_EXCEEDED")

    def stream() -> None:
        with observer.rpc("S/Stream", (), peer) as observed:
            observed.request.is_stream = True
            with observer.part("start"):
                raise cause

    with pytest.raises(GradruleError):
        stream()
    (line,) = lines(file)
    assert line["rpc"] == "S/Stream/start"
    make(AuditLog(), fails=cause, within=lambda request: setattr(request, "is_stream", True))
    assert len(lines(file)) == 2


def test_rate_of_refusal_lines_is_limited(file: Path) -> None:
    now = [0.0]
    log = AuditLog(RateLimiter(1, 3, lambda: now[0]))
    for _ in range(50):
        make(log, fails=refusal("PERMISSION_DENIED"), tenant="greedy")
    make(log, fails=refusal("PERMISSION_DENIED"), tenant="other")
    log.log_dropped()
    assert [(line["event"], line.get("tenant"), line.get("count")) for line in lines(file)] == [
        *[("refusal", "greedy", None)] * 3,
        ("refusal", "other", None),
        ("left_out", None, 47),
    ]
    assert log.dropped == 47
    log.log_dropped()
    assert len(lines(file)) == 5


def test_rate_of_registration_lines_is_limited(file: Path) -> None:
    now = [0.0]
    log = AuditLog(registrations=RateLimiter(10, 4, lambda: now[0]))
    rpc, request, answer = MADE[0]

    def register(tenant: str, times: int) -> list[str]:
        before = len(lines(file))
        for _ in range(times):
            make(log, rpc=rpc, tenant=tenant, within=lambda _: record_registration(request, answer))
        return [line["event"] for line in lines(file)[before:]]

    assert register("greedy", 50) == ["registration"] * 4
    assert register("other", 1) == ["registration"]
    # Refusals have a budget of their own.
    make(log, fails=refusal("QUOTA_EXCEEDED"), tenant="greedy")
    log.log_dropped()
    refused, reported = lines(file)[-2:]
    assert (refused["event"], reported["event"]) == ("refusal", "left_out")
    assert (reported["count"], reported["registrations"], log.dropped) == (46, 46, 46)
    now[0] = 0.2
    assert register("greedy", 3) == ["registration"] * 2


def test_a_thousand_registrations_at_once_are_all_written(file: Path) -> None:
    log = AuditLog()
    for _ in range(1500):
        answered(*MADE[0], log)
    assert 1000 <= len(lines(file)) < 1500


def test_each_quarantine_is_a_line(file: Path) -> None:
    AuditLog().log_quarantine("0f1e2d: signal 6, twice")
    (line,) = lines(file)
    assert (line["event"], line["detail"]) == ("quarantine", "0f1e2d: signal 6, twice")


def test_only_the_owner_can_read_the_file(file: Path) -> None:
    AuditLog().log_quarantine("x")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_file_is_created_again_after_it_was_moved(file: Path) -> None:
    log = AuditLog()
    log.log_quarantine("first")
    file.rename(file.with_suffix(".1"))
    log.log_quarantine("second")
    assert [line["detail"] for line in lines(file.with_suffix(".1"))] == ["first"]
    assert [line["detail"] for line in lines(file)] == ["second"]


def test_lines_are_appended(file: Path) -> None:
    AuditLog().log_quarantine("first")
    audit.configure(str(file))
    AuditLog().log_quarantine("second")
    assert [line["detail"] for line in lines(file)] == ["first", "second"]


def test_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no/audit"):
        audit.configure(str(tmp_path / "no" / "audit"))
    audit.configure("")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_full_disk_is_reported_once_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    audit.configure("/dev/full")
    try:
        for _ in range(5):
            make(AuditLog(), fails=refusal("PERMISSION_DENIED"))
        assert caplog.text.count("cannot be written") == 1
    finally:
        audit.configure("")


@contextlib.contextmanager
def full_disk(file: Path, free_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond the size that this one has, plus some bytes, as on a full disk."""
    with file.open("ab") as raw:
        # Other files of this process must stay below the limit.
        raw.write(b"x" * (8 << 20) + b"\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("restarts", [False, True])
def test_line_that_a_full_disk_cuts_off_is_counted_and_merges_with_no_other(file: Path, restarts: bool) -> None:
    log = AuditLog()
    [handler] = [each for each in audit.LOGGER.handlers if isinstance(each, LineHandler)]
    log.log_quarantine("before")
    with full_disk(file, 40):
        log.log_quarantine("cut off")
        log.log_quarantine("left out")
    assert handler.dropped.take() == 2
    if restarts:
        audit.configure(str(file))
    log.log_quarantine("after")
    log.log_quarantine("last")
    before, _, cut, *after = file.read_text().splitlines()
    assert json.loads(before)["detail"] == "before"
    assert len(cut) == 40
    assert [json.loads(line)["detail"] for line in after] == ["after", "last"]


def test_lines_of_several_writers_are_lost_and_merged_by_no_rotation(file: Path) -> None:
    """Two servers write one file, which is moved away again and again."""
    count = 500
    script = (
        "import sys; from gradrule_server.operations import audit\n"
        "audit.configure(sys.argv[1])\n"
        f"for number in range({count}):\n"
        "    audit.LOGGER.info('line', extra=audit.fields(detail=f'{sys.argv[2]}-{number}'))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(file), name]) for name in ("a", "b")]
    moved = [file]
    while any(writer.poll() is None for writer in writers):
        if file.exists():
            moved.append(file.with_suffix(f".{len(moved)}"))
            file.rename(moved[-1])
        time.sleep(0.01)
    assert [writer.wait() for writer in writers] == [0, 0]
    found = sorted(line["detail"] for path in moved if path.exists() for line in lines(path))
    assert found == sorted(f"{name}-{number}" for name in ("a", "b") for number in range(count))


def test_without_a_file_lines_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    audit.configure("")
    with caplog.at_level(logging.INFO):
        AuditLog().log_quarantine("x")
    assert "quarantine" in caplog.text


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    audit.configure("-")
    try:
        AuditLog().log_quarantine("x")
        assert json.loads(capsys.readouterr().out)["event"] == "quarantine"
    finally:
        audit.configure("")
