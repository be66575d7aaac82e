"""gradrule.jax, compared with the same functions in JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import gradrule.jax
from gradrule.errors import FeedDtypeError, FeedShapeError, InvalidDerivativeError, UnsupportedError
from tests.bridges import examples


@pytest.fixture(autouse=True)
def _with_64_bits() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


X, W, BATCH = examples.X, examples.W, examples.BATCH


def local(x: Any, w: Any) -> Any:
    """Computes `examples.smooth_graph` in JAX."""
    h = jnp.tanh(x @ w)
    return h**2, h.sum()


@pytest.fixture
def remote(smooth: Any) -> Any:
    """Returns the remote function with a tuple as its result."""
    function = gradrule.jax.remote(smooth)
    return lambda x, w: tuple(function(x=x, w=w).values())


def assert_equal(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, wanted)


def test_gradients_pass_jaxs_check(remote: Any) -> None:
    check_grads(remote, (X, W), order=1, modes=("fwd", "rev"))
    check_grads(lambda w: remote(X, w)[1], (W,), order=2, modes=("rev",))


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("compiled", [False, True])
def test_jacobians_equal_those_of_jax(remote: Any, transform: Any, compiled: bool) -> None:
    found = transform(remote, argnums=(0, 1))
    assert_equal((jax.jit(found) if compiled else found)(X, W), transform(local, argnums=(0, 1))(X, W))


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_equals_that_of_jax(remote: Any, compiled: bool) -> None:
    def per_example(function: Any) -> Any:
        return jax.vmap(jax.value_and_grad(lambda x, w: function(x, w)[1], argnums=(0, 1)), in_axes=(0, None))

    found = per_example(remote)
    assert_equal((jax.jit(found) if compiled else found)(BATCH, W), per_example(local)(BATCH, W))
    nested = np.stack([BATCH, BATCH * 2])
    assert_equal(
        jax.vmap(jax.vmap(lambda x: remote(x, W)[0]))(nested), jax.vmap(jax.vmap(lambda x: local(x, W)[0]))(nested)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_gradients_equal_those_of_jax(remote: Any, compiled: bool) -> None:
    def twice(function: Any) -> Any:
        return jax.grad(lambda w: jnp.sin(jax.grad(lambda v: function(X, v)[1])(w)).sum())

    found = twice(remote)
    assert_equal((jax.jit(found) if compiled else found)(W), twice(local)(W))


def test_hessians_equal_those_of_jax(remote: Any) -> None:
    assert_equal(jax.hessian(lambda w: remote(X, w)[1])(W), jax.hessian(lambda w: local(X, w)[1])(W))


def test_reverse_over_forward_equals_that_of_jax(remote: Any) -> None:
    def twice(function: Any) -> Any:
        return jax.grad(lambda w: jax.jvp(lambda v: function(X, v)[1], (w,), (W,))[1])(W)

    assert_equal(twice(remote), twice(local))


TRANSFORMS: dict[str, Any] = {
    "checkpoint": lambda f, w: jax.grad(lambda v: jax.checkpoint(lambda u: jnp.sin(f(X, u)))(v).sum())(w),
    "grad of scan": lambda f, w: jax.grad(lambda v: scan(f, v)[0].sum())(w),
    "jvp of scan": lambda f, w: jax.jvp(lambda v: scan(f, v), (w,), (w,)),
    "vmap of scan": lambda f, w: jax.vmap(lambda v: scan(f, v))(jnp.stack([w, 2 * w])),
    "vmap with axes": lambda f, w: jax.vmap(f, in_axes=(None, 1), out_axes=2)(X, jnp.stack([w, 2 * w], 1)),
    "vmap with a name": lambda f, w: jax.vmap(lambda v: jax.lax.pmean(f(X, v), "i"), axis_name="i")(
        jnp.stack([w, 2 * w])
    ),
    "grad of cond": lambda f, w: jax.grad(
        lambda v: jax.lax.cond(v[0, 0] > 0, lambda u: f(X, u).sum(), lambda u: 2 * f(X, u).sum(), v)
    )(w),
    "while loop": lambda f, w: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, pad(f(s[1], w))), (0, X)),
    "linearize": lambda f, w: jax.linearize(lambda v: f(X, v), w)[1](w),
}


def pad(y: Any) -> Any:
    """Returns y, of shape (4, 2), as an x, of shape (4, 3)."""
    return jnp.pad(y, ((0, 0), (0, 1)))


def scan(function: Any, w: Any) -> Any:
    """Applies a function five times in a loop of JAX."""
    return jax.lax.scan(lambda x, _: (pad(function(x, w)), x.sum()), jnp.asarray(X), None, length=5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_equal_those_of_jax(remote: Any, transform: str, compiled: bool) -> None:
    def of(function: Any) -> Any:
        return lambda w: TRANSFORMS[transform](lambda x, v: function(x, v)[0], w)

    found = of(remote)
    assert_equal((jax.jit(found) if compiled else found)(W), of(local)(W))


def test_overrides_apply(binary: Any) -> None:
    x, w = np.float32(X), np.float32(W)
    found = jax.jit(jax.grad(gradrule.jax.remote(binary), argnums=(0, 1)))(x, w)
    for gradient, wanted in zip(found, examples.straight_through(x, w), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_derivatives_of_a_gradient_with_overrides_equal_those_of_the_local_rule(client: Any) -> None:
    """It is symmetric: in the derivative of the gradient, the sign itself has the derivative of the rule too."""
    g = gradrule.Graph()
    w = g.placeholder("w", "float64", [3])
    total = g.op_output("Exp", g.reduce_sum(w, axis=[0]))
    g.reduce_sum(g.op_output("Sign", w) * total, axis=[0], name="y")
    program = client.compile(g, fetches=["y"], ys=["y"], xs=["w"], overrides={"Sign": "fast_sigmoid"})
    sign = gradrule.jax.surrogate("fast_sigmoid", "sign")

    def local(w: Any) -> Any:
        return (sign(w) * jnp.exp(w.sum())).sum()

    at = np.array([0.1, -0.2, 0.4])
    found = jax.jacrev(jax.grad(gradrule.jax.remote(program)))(at)
    np.testing.assert_allclose(found, jax.jacrev(jax.grad(local))(at), rtol=1e-9)
    np.testing.assert_allclose(found, found.T, rtol=1e-9)


def test_forward_mode_of_a_gradient_with_overrides_is_refused(binary: Any) -> None:
    loss = gradrule.jax.remote(binary)
    with pytest.raises(UnsupportedError, match="reverse mode for the outer derivative"):
        jax.hessian(loss)(np.float32(X), np.float32(W))


def test_integers_have_no_gradients(client: Any) -> None:
    g = gradrule.Graph()
    x, n = g.placeholder("x", "float32", [None]), g.placeholder("n", "int32", [])
    g.multiply(x, g.op_output("Cast", n, DstT="float32"), name="y")
    g.op("Add", n, n, name="twice")
    power = gradrule.jax.remote(client.compile(g, fetches=["y", "twice"], ys=["y", "twice"], xs=["x", "n"]))
    found = jax.grad(lambda x: power(x, np.int32(3))["y"].sum())(np.float32([1, 2]))
    np.testing.assert_array_equal(found, [3, 3])
    assert power(np.float32([1]), np.int32(3))["twice"] == 6


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_by_complex_inputs_equal_those_of_jax(client: Any, compiled: bool) -> None:
    program = client.compile(examples.complex_graph(), fetches=["y"], ys=["y"], xs=["z", "w"])
    z, w = examples.Z, examples.Z[::-1] * (2 - 1j)

    def derivatives(function: Any) -> Any:
        def first(z: Any, w: Any) -> Any:
            return jax.grad(lambda *zw: function(*zw).sum(), argnums=(0, 1))(z, w)

        pushed = jax.jvp(function, (z, w), (w, z))
        again = jax.grad(lambda z: sum(jnp.sum(jnp.abs(part) ** 3) for part in first(z, w)))(z)
        along = jax.jvp(lambda z: first(z, w), (z,), (w,))
        per_row = jax.vmap(lambda z: jax.vjp(function, z, w)[1](jnp.arange(3.0)))(jnp.stack([z, w]))
        return first(z, w), pushed, again, along, per_row

    def local(z: Any, w: Any) -> Any:
        return jnp.real(jnp.exp(z) * w * jnp.conj(z))

    remote = gradrule.jax.remote(program)
    check_grads(remote, (z, w), order=1, modes=("fwd", "rev"))
    found = (jax.jit(lambda: derivatives(remote)) if compiled else lambda: derivatives(remote))()
    assert_equal(found, derivatives(local))


def test_shapes_of_eager_calls_are_those_of_the_results(client: Any) -> None:
    g = gradrule.Graph()
    m = g.placeholder("m", "float64", [None, None])
    g.op("MatrixInverse", m, name="y")
    inverse = gradrule.jax.remote(client.compile(g, fetches=["y"], ys=["y"], xs=["m"]))
    value = np.array([[2.0, 0.0], [0.0, 4.0]])
    np.testing.assert_allclose(inverse(value), np.linalg.inv(value))
    with pytest.raises(FeedShapeError, match="with zeros, to learn them, failed"):
        jax.jit(inverse)(value)


# In a process of its own: JAX reads its number of threads and devices once.
_ONE_PROCESSOR = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax
import numpy as np
import gradrule as gr
import gradrule.jax
from tests.bridges import examples

jax.config.update("jax_enable_x64", True)
with gr.connect(sys.argv[1]) as client:
    remote = gradrule.jax.remote(client.program(sys.argv[2]))
    gradient = jax.jit(jax.grad(lambda x: remote(x=2 * x, w=examples.W)["z"]))
    for rows in (1, 5_000, 10_000, 50_000, 500_000):
        x = np.linspace(-1, 1, 3 * rows).reshape(rows, 3)
        wanted = 2 * (1 - np.tanh(2 * x @ examples.W) ** 2) @ examples.W.T
        np.testing.assert_allclose(gradient(x), wanted, rtol=1e-12, atol=1e-12)
"""

_FOUR_DEVICES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import gradrule as gr
import gradrule.jax
from tests.bridges import examples

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((4,), ("rows",))
x = np.linspace(-1, 1, 24).reshape(8, 3)
sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
assert len(sharded.devices()) == 4
with gr.connect(sys.argv[1]) as client:
    remote = gradrule.jax.remote(client.program(sys.argv[2]))
    gradient = jax.jit(jax.grad(lambda x: remote(x=2 * x, w=examples.W)["z"]))
    wanted = 2 * (1 - np.tanh(2 * x @ examples.W) ** 2) @ examples.W.T
    np.testing.assert_allclose(gradient(sharded), wanted, rtol=1e-12, atol=1e-12)
"""

_FOUR_DEVICES_ON_ONE_PROCESSOR = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
import gradrule as gr
import gradrule.jax
from tests.bridges import examples

jax.config.update("jax_enable_x64", True)
mesh, rows = Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows")
x = np.linspace(-1, 1, 1_200_000).reshape(-1, 3)
with gr.connect(sys.argv[1]) as client:
    remote = gradrule.jax.remote(client.program(sys.argv[2]))
    gradient = jax.grad(lambda x: remote(x=2 * x, w=examples.W)["z"])
    shard = lambda x: jax.lax.psum(gradient(x).sum(), "rows")
    total = jax.shard_map(shard, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
    wanted = 2 * (1 - np.tanh(2 * x @ examples.W) ** 2) @ examples.W.T
    np.testing.assert_allclose(jax.jit(total)(x), wanted.sum(), rtol=1e-9)
    np.testing.assert_allclose(jax.pmap(gradient)(x.reshape(4, -1, 3)).reshape(-1, 3), wanted, rtol=1e-12, atol=1e-12)
"""

_DEVICES = "--xla_force_host_platform_device_count=4"


@pytest.mark.parametrize(
    ("script", "flags"),
    [(_ONE_PROCESSOR, ""), (_FOUR_DEVICES, _DEVICES), (_FOUR_DEVICES_ON_ONE_PROCESSOR, _DEVICES)],
    ids=["one processor", "four devices", "four devices on one processor"],
)
def test_compiled_gradients_equal_those_of_numpy_on(smooth: Any, script: str, flags: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, smooth._client.target, smooth.name],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_network_trains(digits_network: Any) -> None:
    program, start = digits_network
    loss = gradrule.jax.remote(program)
    digits = examples.DIGITS

    @jax.jit
    def step(weights: Any, squares: Any, x: Any, labels: Any) -> Any:
        gradients = jax.grad(lambda found: loss(x=x, labels=labels, **found))(weights)
        squares = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g * g, squares, gradients)
        return (
            jax.tree.map(
                lambda w, g, s: jnp.clip(w - 0.01 * g / (jnp.sqrt(s) + 1e-6), -1, 1), weights, gradients, squares
            ),
            squares,
        )

    weights = {name: jnp.asarray(value) for name, value in start.items()}
    squares = jax.tree.map(jnp.zeros_like, weights)
    for batch in examples.BATCHES:
        weights, squares = step(weights, squares, digits.train_x[batch], digits.train_labels[batch])
    trained = {name: np.asarray(value) for name, value in weights.items()}
    assert examples.accuracy(program, trained) >= examples.WANTED_ACCURACY


def test_wrong_arguments_are_refused(client: Any, smooth: Any) -> None:
    remote = gradrule.jax.remote(smooth)
    with pytest.raises(FeedDtypeError, match="'x' is float64, not float32"):
        remote(np.float32(X), W)
    with pytest.raises(FeedShapeError, match="'w' has shape"):
        remote(X, X)
    by_w = gradrule.jax.remote(client.compile(examples.smooth_graph(), fetches=["z"], ys=["z"], xs=["w"]))
    with pytest.raises(InvalidDerivativeError, match="'x' is not one of the program's xs"):
        jax.grad(by_w)(X, W)
    with jax.enable_x64(False), pytest.raises(UnsupportedError, match="jax_enable_x64"):
        gradrule.jax.remote(smooth)


def test_programs_that_draw_random_numbers_are_refused(dropout: Any) -> None:
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        gradrule.jax.remote(dropout)
