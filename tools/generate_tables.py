"""Writes the client's table of op definitions from the installed TensorFlow.

python tools/generate_tables.py            # writes client/python/gradrule/common/ops.json.gz
python tools/generate_tables.py --check    # exit code 1 where the committed file differs
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before TensorFlow's import, which reads it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import ops

from gradrule.common import op_definitions
from gradrule.v1.graph_pb2 import OpSignature

TARGET = Path(__file__).resolve().parents[1] / "client/python/gradrule/common/ops.json.gz"


def tensorflow_op_definitions() -> list[bytes]:
    """Serialised `OpDef` of every op type that TensorFlow registers."""
    op_list = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return [definition.SerializeToString() for definition in op_list.op]


def gradients() -> dict[str, str]:
    """`registered` or `none` by op type, as TensorFlow's gradient registry has it."""
    registry = ops.gradient_registry
    return {name: "none" if registry.lookup(name) is None else "registered" for name in registry.list()}


def table() -> bytes:
    """The bytes of the table."""
    signatures = [OpSignature.FromString(definition) for definition in tensorflow_op_definitions()]
    rows = {signature.name: op_definitions.row_of(signature) for signature in signatures}
    return op_definitions.encode_table(rows, gradients(), tf.__version__, tf.version.GRAPH_DEF_VERSION)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the table of op definitions from the installed TensorFlow.")
    parser.add_argument("--check", action="store_true", help="only compare with the file that is there")
    options = parser.parse_args()
    data = table()
    if options.check:
        # The compressed bytes depend on zlib's version; the content must not.
        return int(op_definitions.decode_table(TARGET.read_bytes()) != op_definitions.decode_table(data))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
