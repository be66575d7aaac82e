"""Runs the graphs of rules with JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np

from gradrule._bridges.rule_graphs import Compute


class JaxLibrary:
    """JAX, for `rule_graphs.run_rule_graph`."""

    index = 2

    def owns(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def function(self, name: str) -> Compute:
        if name == "abs":
            return _abs
        module: Any = jax.scipy.special if name.startswith("scipy.special.") else jnp
        found: Compute = getattr(module, name.rpartition(".")[2])
        return found

    def array(self, value: Any, like: Any) -> Any:
        return jnp.asarray(value)

    def cast(self, value: Any, dtype: str) -> Any:
        # Without `jax_enable_x64`, JAX has no 64-bit types; it computes in those of 32 bits.
        return value.astype(jax.dtypes.canonicalize_dtype(dtype))

    def reduce(self, op: str, value: Any, axes: tuple[int, ...], keep: bool) -> Any:
        empty = {"initial": -np.inf if op == "Max" else np.inf} if op in ("Max", "Min") and value.size == 0 else {}
        return getattr(jnp, op.lower())(value, axis=axes, keepdims=keep, **empty)

    def sigmoid(self, value: Any) -> Any:
        return jax.nn.sigmoid(value)

    def softplus(self, value: Any) -> Any:
        return jax.nn.softplus(value)

    def softmax(self, value: Any, log: bool) -> Any:
        return (jax.nn.log_softmax if log else jax.nn.softmax)(value, axis=-1)

    def where(self, condition: Any, first: Any, second: Any) -> Any:
        return jnp.where(condition, first, second)

    def constant(self, value: Any) -> Any:
        return jax.lax.stop_gradient(value)


def _abs(value: Any) -> Any:
    # The derivative of JAX's own function is 1 at 0; TensorFlow's is 0.
    return jnp.abs(value) if jnp.iscomplexobj(value) else value * jax.lax.stop_gradient(jnp.sign(value))


JAX = JaxLibrary()
