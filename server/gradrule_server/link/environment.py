"""The environment of an engine: what its libraries need, and no more."""

from __future__ import annotations

import os
import site

# Where Python and libraries are, and TensorFlow's and CUDA's own settings.
_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("TF_", "CUDA_", "NVIDIA_", "XLA_", "OMP_")
# Terraform's variables, which may be secrets.
_HELD_BACK_PREFIXES = ("TF_VAR_", "TF_TOKEN_", "TF_CLI_")


def engine_environment() -> dict[str, str]:
    """From this process's environment."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)) and not name.startswith(_HELD_BACK_PREFIXES)
    }
    own = {
        # The working folder holds no libraries, and whatever is on the path an engine may read.
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        # Memory for large tensors comes in large pages where the system has them: in small ones, getting it takes
        # longer than filling it.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # How Keras is set up for whoever serves must not change what it computes; there is no such folder.
        "KERAS_HOME": os.path.join(os.devnull, "keras"),
    }
    if site.ENABLE_USER_SITE:
        # Without HOME it would not be found.
        own["PYTHONUSERBASE"] = site.getuserbase()
    return passed_on | own
