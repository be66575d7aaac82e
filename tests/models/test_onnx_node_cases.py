"""Compares each test case that onnx has for its operations with local TensorFlow: right, refused, never wrong."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

import gradrule as gr
from gradrule._models.onnx_files import OLDEST_OPSET
from gradrule.errors import UnsupportedError
from tests.models.onnx_running import Array, run_locally

# Twice the distance of neighbouring numbers of 1, and four times for results of several operations.
_ROUNDING = {np.dtype(np.float16): 2**-8, np.dtype(ml_dtypes.bfloat16): 2**-6}


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    with warnings.catch_warnings():
        # Cases divide by zero on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        return load_model_tests(kind="node")


def test_no_case_is_wrong(cases: list[Any]) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for case in cases:
        versions = {item.domain: item.version for item in case.model.opset_import}
        if versions.get("", OLDEST_OPSET) < OLDEST_OPSET:
            counts["older opset"] += 1
            continue
        try:
            graph, inputs = _converted(case)
        except UnsupportedError as error:
            assert all(detail.message for detail in error.details), case.name
            counts["refused"] += 1
            continue
        for values, expected in case.data_sets:
            arrays = [_array(value) for value in values]
            feeds = {name: array for name, array in zip(_inputs(case.model), arrays, strict=True) if name in inputs}
            found = run_locally(graph, feeds, [item.name for item in case.model.graph.output])
            same = all(_is_same(y, _array(want), case) for y, want in zip(found, expected, strict=True))
            counts["right" if same else "wrong"] += 1
            if not same:
                wrong.append(case.name)
    assert not wrong
    # Refused are element types that graphs do not have (240 cases), sequences, strings, random numbers, and a few more.
    assert counts["right"] >= 1510, counts
    assert counts["refused"] <= 310, counts


def _inputs(model: onnx.ModelProto) -> list[str]:
    return [item.name for item in model.graph.input]


def _converted(case: Any) -> tuple[gr.Graph, list[str]]:
    """Converts a case. Arguments that models hold as initialisers, such as scales, become such where they must."""
    try:
        return gr.from_onnx(case.model.SerializeToString()), _inputs(case.model)
    except UnsupportedError as error:
        if "is computed by other nodes" not in str(error.details):
            raise
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    first, *others = model.graph.input
    for item, value in zip(others, case.data_sets[0][0][1:], strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(_array(value), item.name))
    del model.graph.input[1:]
    return gr.from_onnx(model.SerializeToString()), [first.name]


def _array(value: Any) -> Array:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _is_same(found: Array, expected: Array, case: Any) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype.kind in "iub":
        return bool((found == expected).all())
    relative = max(case.rtol, _ROUNDING.get(found.dtype, 0))
    found, expected = (array.astype(complex) for array in (found, expected))
    finite = np.abs(expected[np.isfinite(expected)])
    absolute = max(case.atol, 1e-6 * max(1.0, float(finite.max(initial=1))))
    return np.allclose(found, expected, rtol=relative, atol=absolute, equal_nan=True)
