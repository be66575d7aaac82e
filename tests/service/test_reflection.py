"""Reflection can be disabled; tests/contract tests what it serves."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.contract.test_protos import Reflection
from tests.service.servers import running_server


def test_reflection_can_be_disabled(tmp_path: Path) -> None:
    with running_server(tmp_path, ["--no-reflection"]) as running, grpc.insecure_channel(running.target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            Reflection(channel).services()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
