"""The environment of an engine: what its libraries need, and no more."""

from __future__ import annotations

import os
import site

# Where Python and libraries are, and TensorFlow's and CUDA's own settings.
_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("TF_", "CUDA_", "NVIDIA_", "XLA_", "OMP_")
# Terraform's variables, which may be secrets.
_HELD_BACK_PREFIXES = ("TF_VAR_", "TF_TOKEN_", "TF_CLI_")
# What else would put an allocator between TensorFlow and the system's.
_HELD_BACK = ("TF_CPU_ALLOCATOR_USE_BFC",)

_MALLOC = {
    # Memory for large tensors comes in large pages where the system has them: in small ones, getting it takes longer
    # than filling it.
    "hugetlb": 1,
    # Memory is handed out filled with 255 ^ 255: some kernels leave parts of their outputs as they found them, and what
    # is found there would be other callers' tensors.
    "perturb": 255,
    # What this cache hands out is not filled.
    "tcache_count": 0,
    # Filling must not make pages anew each time: what was freed is kept, as TensorFlow's own allocator would keep it.
    # No tensor has pages of its own from the kernel, whatever its size: 100 MiB of new ones take longer than the work.
    "mmap_max": 0,
    "trim_threshold": 256 << 20,
    "top_pad": 64 << 20,
}

_XLA_FLAGS = (
    # XLA computes programs as they are written: its algebraic simplifier regroups floats.
    "--xla_disable_hlo_passes=algsimp",
    # Otherwise maxima and minima leave out NaN.
    "--xla_cpu_enable_fast_min_max=false",
)


def engine_environment() -> dict[str, str]:
    """From this process's environment."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))
        and not name.startswith((*_HELD_BACK, *_HELD_BACK_PREFIXES))
    }
    own = {
        # The working folder holds no libraries, and whatever is on the path an engine may read.
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
        # NumPy's linear algebra would start threads when it is imported, and only a process with one thread can fork.
        "OPENBLAS_NUM_THREADS": "1",
        # TensorFlow's own allocator hands out memory again as it was left.
        "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
        # The last flag of a name wins.
        "XLA_FLAGS": " ".join([passed_on.get("XLA_FLAGS", ""), *_XLA_FLAGS]).strip(),
        # How Keras is set up for whoever serves must not change what it computes; there is no such folder.
        "KERAS_HOME": os.path.join(os.devnull, "keras"),
    }
    if site.ENABLE_USER_SITE:
        # Without HOME it would not be found.
        own["PYTHONUSERBASE"] = site.getuserbase()
    return passed_on | own
