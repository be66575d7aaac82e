"""The reviewed list of ops matches the installed TensorFlow and denies unknown ops."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gradrule.common import op_definitions
from gradrule_server import policy
from gradrule_server.policy.op_tables import NOT_REVIEWED, REMEDIES, read_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]

# A second list, so that an error in either is noticed.
_DANGEROUS = [
    "ReadFile", "MatchingFiles", "ImmutableConst", "GenerateVocabRemapping", "InitializeTableFromTextFile",
    "InitializeTableFromTextFileV2", "SnapshotDatasetReader", "SnapshotChunkDataset", "SnapshotNestedDatasetReader",
    "DecodeProtoV2", "EncodeProto", "FixedUnigramCandidateSampler", "Skipgram", "RecordInput", "LoadAndRemapMatrix",
    "Restore", "RestoreSlice", "RestoreV2", "LoadDataset", "CacheDataset", "SnapshotDataset", "DebugIdentity",
    "DebugNanCount", "DebugNumericSummary", "WriteFile", "PrintV2", "Save", "SaveSlices", "SaveV2",
    "MergeV2Checkpoints", "DistributedSave", "SaveDataset", "DatasetToTFRecord", "DumpTensor", "WriteSummary",
    "RegisterDataset", "DataServiceDataset", "RpcCall", "RemoteCall", "Send", "Recv", "CollectiveReduceV2",
    "NcclAllReduce", "TPUExecute", "PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset", "XlaCustomCall",
    "XlaCallModule", "XlaLaunch", "SymbolicGradient", "GetSessionHandle", "GetSessionTensor", "Batch", "Unbatch",
    "BatchFunction", "Stage", "FIFOQueueV2", "Barrier", "HashTableV2", "SleepOp", "Abort", "Empty", "InplaceUpdate",
    "ParallelConcat", "ParseTensor", "_Recv", "_Arg", "_EagerConst",
]  # fmt: skip


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_op_policy", ROOT / "tools/generate_op_policy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_list_and_page_are_current(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_op_policy.py", "--check"])
    assert generator.main() == 0


def test_every_op_of_tensorflow_was_reviewed(generator: ModuleType) -> None:
    digests = generator.definitions()
    assert list(policy.op_reviews()) == sorted(digests) == list(op_definitions.names())
    for name, digest in digests.items():
        review = policy.review_with_digest(name, digest)
        assert review is policy.op_reviews()[name]
        assert review.category != NOT_REVIEWED
        assert len(review.reason) > 5
        assert review.allowed or review.category in REMEDIES


def test_new_and_changed_ops_are_denied_until_they_are_reviewed(generator: ModuleType) -> None:
    kept = dict(policy.op_reviews())
    digests = {name: row.digest for name, row in kept.items()} | {"Sign": "0" * 16, "Brandnew": "1" * 16}
    del digests["Abs"]
    rows = {row.op: row for row in generator.current(kept, digests)}
    assert "Abs" not in rows
    assert not rows["Sign"].allowed and rows["Sign"].category == NOT_REVIEWED and rows["Sign"].digest == "0" * 16
    assert not rows["Brandnew"].allowed and rows["Brandnew"].category == NOT_REVIEWED
    assert rows["Tanh"] is kept["Tanh"] and rows["ReadFile"] is kept["ReadFile"]
    assert NOT_REVIEWED in REMEDIES
    # As in an engine with another TensorFlow than that of the list.
    for name in ("Sign", "Brandnew"):
        review = policy.review_with_digest(name, digests[name])
        assert not review.allowed and review.category == NOT_REVIEWED


def test_text_and_rows_agree() -> None:
    rows = list(policy.op_reviews().values())
    assert read_rows(write_rows(rows)) == dict(policy.op_reviews())
    with pytest.raises(ValueError, match="Sign"):
        read_rows(write_rows([*rows, replace(policy.op_reviews()["Sign"], allowed=False)]))
    with pytest.raises(ValueError, match="neither"):
        read_rows("Sign\tperhaps\tmath\t0\tit depends\n")


def test_dangerous_ops_are_denied() -> None:
    assert not {name for name in _DANGEROUS if policy.op_reviews()[name].allowed}


def test_ops_with_a_gradient_run_unless_they_reach_outside_the_graph() -> None:
    reviews = policy.op_reviews()
    denied = {name: reviews[name].category for name in op_definitions.gradients() if name in reviews}
    outside = {"TPU", "code", "compiler", "debug", "distributed", "file write", "internal", "network"}
    earlier = {"control", "tensor array", "variable"}
    assert {reviews[name].category for name in denied if not reviews[name].allowed} == outside | earlier
