"""What may run, and how large it may be: the reviewed list of ops, and the checks of one node. Pure, no TensorFlow.

`ops.tsv` is the list; graphs, rules and engines all ask here.
"""

from gradrule_server.policy.blob_names import check_blob_name, missing_blobs
from gradrule_server.policy.bounds import Bounds, Limits
from gradrule_server.policy.checks import DROPPED, NOT_TAKEN, count_fault, refusal, value_faults
from gradrule_server.policy.table import Ruling, digest_of, judged, ruling_of, rulings
from gradrule_server.policy.tensors import Fault, shape_fault, tensor_fault
from gradrule_server.policy.variables import value_fault
from gradrule_server.policy.wire import FREE_BYTES, SMALL_BYTES, check_unpacking

__all__ = [
    "DROPPED",
    "FREE_BYTES",
    "NOT_TAKEN",
    "SMALL_BYTES",
    "Bounds",
    "Fault",
    "Limits",
    "Ruling",
    "check_blob_name",
    "check_unpacking",
    "count_fault",
    "digest_of",
    "judged",
    "missing_blobs",
    "refusal",
    "ruling_of",
    "rulings",
    "shape_fault",
    "tensor_fault",
    "value_fault",
    "value_faults",
]
