"""What may run, and how large it may be: the reviewed list of ops, and the checks of one node. Pure, no TensorFlow.

`ops.tsv` is the list; graphs, rules and engines all ask here.
"""

from gradrule_server.policy.bounds import Bounds
from gradrule_server.policy.checks import DROPPED, Fault, count_fault, refusal, value_faults
from gradrule_server.policy.table import Ruling, digest_of, judged, ruling_of, rulings
from gradrule_server.policy.tensors import shape_fault, tensor_fault

__all__ = [
    "DROPPED",
    "Bounds",
    "Fault",
    "Ruling",
    "count_fault",
    "digest_of",
    "judged",
    "refusal",
    "ruling_of",
    "rulings",
    "shape_fault",
    "tensor_fault",
    "value_faults",
]
