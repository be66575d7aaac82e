"""Says how large the samples of tests are: `make test-all` tries more random cases, and each case of large tables."""

from __future__ import annotations

import os

VARIABLE = "GRADRULE_WHOLE_SAMPLES"

WHOLE = bool(os.environ.get(VARIABLE))
"""Whether the samples are whole."""


def size(some: int, whole: int) -> int:
    """Returns the number of cases that a test tries: `some`, or `whole` in `make test-all`."""
    return whole if WHOLE else some
