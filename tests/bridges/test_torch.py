"""gradrule.torch, compared with the same functions in PyTorch."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import gradrule as gr
import gradrule.scipy
import gradrule.torch
from gradrule.errors import (
    FeedDtypeError,
    FeedShapeError,
    GradruleWarning,
    InvalidDerivativeError,
    MissingFeedError,
    UnknownFeedError,
    UnsupportedError,
)
from tests.bridges import examples

# PyTorch's forward mode uses it itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

X, W, BATCH = (torch.tensor(value) for value in (examples.X, examples.W, examples.BATCH))


def local(x: Any, w: Any) -> Any:
    """Computes `examples.smooth_graph` in PyTorch."""
    h = torch.tanh(x @ w)
    return h**2, h.sum()


@pytest.fixture(scope="module")
def remote(smooth: Any) -> Any:
    """Returns the remote function with a tuple as its result."""
    function = gradrule.torch.remote(smooth)
    return lambda x, w: tuple(function(x=x, w=w).values())


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_pass_pytorchs_check(remote: Any) -> None:
    inputs = (X.clone().requires_grad_(), W.clone().requires_grad_())
    assert gradcheck(remote, inputs, check_forward_ad=True)
    assert gradgradcheck(remote, inputs)


def test_tensors_that_convert_without_loss_get_gradients_of_their_own_dtype(smooth: Any) -> None:
    x = X.float().requires_grad_()
    gradrule.torch.remote(smooth)(x=x, w=W)["z"].backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_one_y_is_a_tensor_and_several_are_a_dict(client: Any, smooth: Any) -> None:
    assert set(gradrule.torch.remote(smooth)(X, W)) == {"y", "z"}
    one = client.compile(examples.smooth_graph(), fetches=["z"], ys=["z"], xs=["w"])
    assert_equal(gradrule.torch.remote(one)(x=X, w=W), local(X, W)[1])


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians_equal_those_of_pytorch(remote: Any, transform: Any) -> None:
    assert_equal(transform(remote, argnums=(0, 1))(X, W), transform(local, argnums=(0, 1))(X, W))


def test_vmap_equals_that_of_pytorch(remote: Any) -> None:
    assert_equal(vmap(remote, in_dims=(0, None))(BATCH, W), vmap(local, in_dims=(0, None))(BATCH, W))
    assert_equal(vmap(remote, in_dims=(1, None))(BATCH.movedim(0, 1), W), vmap(local, in_dims=(0, None))(BATCH, W))


def test_gradients_per_example_equal_those_of_pytorch(remote: Any) -> None:
    def per_example(function: Any) -> Any:
        return vmap(grad(lambda x, w: function(x, w)[1], argnums=(0, 1)), in_dims=(0, None))

    assert_equal(per_example(remote)(BATCH, W), per_example(local)(BATCH, W))


def test_jacobian_vector_products_equal_those_of_pytorch(remote: Any) -> None:
    assert_equal(jvp(remote, (X, W), (BATCH[0], W)), jvp(local, (X, W), (BATCH[0], W)))


def test_hessians_equal_those_of_pytorch(remote: Any) -> None:
    def hessian(function: Any) -> Any:
        return jacrev(grad(lambda w: function(X, w)[1]))(W)

    assert_equal(hessian(remote), hessian(local))


def test_reverse_over_forward_equals_that_of_pytorch(remote: Any) -> None:
    def twice(function: Any) -> Any:
        return grad(lambda w: jvp(lambda v: function(X, v)[0].sum(), (w,), (W,))[1])(W)

    assert_equal(twice(remote), twice(local))


def test_gradients_by_complex_inputs_pass_pytorchs_check(client: Any) -> None:
    program = client.compile(examples.complex_graph(), fetches=["y"], ys=["y"], xs=["z", "w"])
    inputs = tuple(torch.tensor(value, requires_grad=True) for value in (examples.Z, examples.Z * (2 - 1j)))
    assert gradcheck(gradrule.torch.remote(program), inputs, check_forward_ad=True)
    assert gradgradcheck(gradrule.torch.remote(program), inputs)


def test_overrides_apply(binary: Any) -> None:
    x, w = X.float().requires_grad_(), W.float().requires_grad_()
    gradrule.torch.remote(binary)(x=x, w=w).backward()
    by_x, by_w = examples.straight_through(x.detach().numpy(), w.detach().numpy())
    np.testing.assert_allclose(x.grad, by_x, rtol=1e-6)
    np.testing.assert_allclose(w.grad, by_w, rtol=1e-6)


def test_random_numbers_of_the_backward_pass_are_those_of_the_forward_pass(dropout: Any) -> None:
    x = torch.arange(1, 1001, dtype=torch.float32, requires_grad=True)
    y = gradrule.torch.remote(dropout)(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    np.testing.assert_allclose(found, (y / x).detach())
    assert 0.3 < float((found == 0).float().mean()) < 0.7


def test_bfloat16_is_kept(client: Any) -> None:
    g = gradrule.Graph()
    x = g.placeholder("x", "bfloat16", [None])
    g.multiply(x, x, name="y")
    square = gradrule.torch.remote(client.compile(g, fetches=["y"], ys=["y"], xs=["x"]))
    value = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    y = square(value)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [2.25, 4.0]
    assert value.grad is not None
    assert value.grad.dtype == torch.bfloat16
    assert value.grad.tolist() == [3.0, -4.0]


def test_a_network_of_a_remote_module_trains(digits_network: Any) -> None:
    program, weights = digits_network
    module = gradrule.torch.remote_module(program, **weights)
    assert set(dict(module.named_parameters())) == set(weights)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    digits = examples.DIGITS
    for batch in examples.BATCHES:
        optimizer.zero_grad()
        module(x=torch.tensor(digits.train_x[batch]), labels=torch.tensor(digits.train_labels[batch])).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-1, 1)
    trained = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    assert examples.accuracy(program, trained) >= examples.WANTED_ACCURACY


def test_a_module_takes_its_other_inputs_in_order_and_keeps_its_state(smooth: Any) -> None:
    module = gradrule.torch.remote_module(smooth, w=examples.W)
    assert "(x, w) -> y, z" in repr(module)
    assert "w=(3, 2)" in repr(module)
    assert_equal(module(X)["y"], local(X, W)[0])
    other = gradrule.torch.remote_module(smooth, w=np.zeros((3, 2)))
    other.load_state_dict(module.state_dict())
    assert_equal(other(x=X)["z"], local(X, W)[1])


@pytest.mark.parametrize(
    ("arguments", "named", "wanted", "text"),
    [
        ((), {"x": X, "v": W}, UnknownFeedError, "'v' is no input"),
        ((X,), {}, MissingFeedError, "no value for the input 'w'"),
        ((X, W, W), {}, UnknownFeedError, "3 arguments"),
        ((X,), {"x": X, "w": W}, UnknownFeedError, "given twice"),
        ((X.to(torch.complex128), W), {}, FeedDtypeError, "float64"),
    ],
)
def test_wrong_arguments_are_refused(smooth: Any, arguments: Any, named: Any, wanted: Any, text: str) -> None:
    with pytest.raises(wanted, match=text):
        gradrule.torch.remote(smooth)(*arguments, **named)


def test_programs_without_what_is_needed_are_refused(client: Any, aio_client: Any) -> None:
    graph = examples.smooth_graph()
    with pytest.raises(InvalidDerivativeError, match="does not return its y 'z'"):
        gradrule.torch.remote(client.compile(graph, ys=["z"], xs=["x"]))
    with pytest.raises(InvalidDerivativeError, match="has no ys"):
        gradrule.torch.remote(client.compile(graph, fetches=["z"]))
    with pytest.raises(InvalidDerivativeError, match="the x 'Tanh' is no input"):
        gradrule.torch.remote(client.compile(graph, fetches=["z"], ys=["z"], xs=["Tanh"]))
    with pytest.raises(UnsupportedError, match="takes a program"):
        gradrule.torch.remote(graph)
    by_w = gradrule.torch.remote(client.compile(graph, fetches=["z"], ys=["z"], xs=["w"]))
    with pytest.raises(InvalidDerivativeError, match="'x' requires a gradient"):
        by_w(X.clone().requires_grad_(), W)
    with pytest.raises(UnknownFeedError, match="'v' is no input"):
        gradrule.torch.remote_module(by_w.program, v=examples.W)
    with pytest.raises(UnknownFeedError, match="Did you mean 'w'"):
        gradrule.torch.remote_module(by_w.program, W=examples.W)
    with pytest.raises(FeedDtypeError, match="'w' is float32"):
        gradrule.torch.remote_module(by_w.program, w=examples.W.astype(np.float32))
    with pytest.raises(FeedShapeError, match=r"'w' has shape \(2, 3\), but the input has \(3, 2\)"):
        gradrule.torch.remote_module(by_w.program, w=examples.W.T)


@pytest.mark.parametrize(
    "result",
    [
        lambda f, w: vmap(lambda x: f(x, w)[1])(BATCH).pow(2).sum(),
        lambda f, w: vmap(f, in_dims=(0, None))(BATCH, w)[0].pow(2).sum(),
        lambda f, w: jacrev(lambda v: f(X, v)[1])(w).pow(2).sum(),
        lambda f, w: jacfwd(lambda v: f(X, v)[1])(w).pow(2).sum(),
        lambda f, w: vmap(grad(lambda x: f(x, w)[1]))(BATCH).pow(2).sum(),
    ],
)
def test_results_of_transforms_are_differentiable(remote: Any, result: Any) -> None:
    found = []
    for function in (remote, local):
        w = W.clone().requires_grad_()
        result(function, w).backward()
        found.append(w.grad)
    assert_equal(*found)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: vmap(vmap(lambda x: f(x, W)[1]))(torch.stack([BATCH, 2 * BATCH])),
        lambda f: vmap(jacrev(lambda x: f(x, W)[1]))(BATCH),
        lambda f: grad(lambda w: vmap(lambda x: f(x, w)[1])(BATCH).sum())(W),
        lambda f: vmap(jacrev(grad(lambda x: f(x, W)[1])))(BATCH[:2]),
    ],
)
def test_nested_transforms_equal_those_of_pytorch(remote: Any, transform: Any) -> None:
    assert_equal(transform(remote), transform(local))


def test_derivatives_that_would_draw_other_numbers_are_refused(dropout: Any) -> None:
    remote, x = gradrule.torch.remote(dropout), torch.ones(3)
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        jvp(remote, (x,), (x,))
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(remote(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        first.sum().backward()


def test_tangents_of_inputs_that_are_no_xs_are_refused(client: Any) -> None:
    by_w = gradrule.torch.remote(client.compile(examples.smooth_graph(), fetches=["z"], ys=["z"], xs=["w"]))
    with pytest.raises(InvalidDerivativeError, match="'x' has a tangent"):
        jvp(lambda x: by_w(x, W), (X,), (X,))
    _, pushed = jvp(lambda w: by_w(X, w), (W,), (W,))
    assert_equal(pushed, jvp(lambda w: local(X, w)[1], (W,), (W,))[1])


def test_many_results_that_are_kept_do_not_use_up_the_server(smooth: Any) -> None:
    remote, w = gradrule.torch.remote(smooth), W.clone().requires_grad_()
    kept = [remote(X, w)["z"] for _ in range(1030)]
    (found,) = torch.autograd.grad(kept[-1], w)
    (wanted,) = torch.autograd.grad(local(X, w)[1], w)
    assert_equal(found, wanted)


def test_modules_can_be_copied_and_pickled(smooth: Any) -> None:
    module = gradrule.torch.remote_module(smooth, w=examples.W)
    copied, loaded = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        module.w.mul_(2)
    for again in (copied, loaded):
        assert_equal(again(X)["z"], local(X, W)[1])
    assert copied._remote.program._client is module._remote.program._client


def test_ensembles_of_modules_equal_those_of_pytorch(smooth: Any) -> None:
    modules = [gradrule.torch.remote_module(smooth, w=k * examples.W) for k in (1, 2)]
    stacked, _ = torch.func.stack_module_state(modules)
    found = vmap(lambda own: torch.func.functional_call(modules[0], (own,), (X,))["z"])(stacked)
    assert_equal(found, torch.stack([local(X, k * W)[1] for k in (1, 2)]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_functions_call_the_server_between_their_graphs(binary: Any) -> None:
    remote = gradrule.torch.remote(binary)
    compiled = torch.compile(lambda x, w: 2 * remote(x=x * 2, w=w), backend="eager")
    x, w = X.float(), W.float().requires_grad_()
    compiled(x, w).backward()
    _, wanted = examples.straight_through(2 * x.numpy(), w.detach().numpy())
    np.testing.assert_allclose(w.grad, 2 * wanted, rtol=1e-6)
    with pytest.raises(Exception, match="it calls a server"):
        torch.compile(lambda x: remote(x=x, w=w), backend="eager", fullgraph=True)(x)


def test_tensors_of_autocast_get_the_dtype_of_their_input(smooth: Any) -> None:
    w = W.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.eye(3) @ w
        assert h.dtype == torch.bfloat16
        found = gradrule.torch.remote(smooth)(x=X, w=h)["z"]
        found.backward()
    assert found.dtype == torch.float64
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


# Exits without freeing the process group, which waits for its threads while it holds the GIL: they may need the GIL.
# Each process stays until both have their gradients, because its end closes their connection.
_PARALLEL_TRAINING = """
import os, sys, time
import torch
import gradrule as gr
import gradrule.torch
from tests.bridges import examples

target, program, folder, rank = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/peers", rank=int(rank), world_size=2)
with gr.connect(target) as client:
    module = gradrule.torch.remote_module(client.program(program), w=examples.W)
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    parallel(torch.tensor(examples.X)[int(rank)::2])["z"].backward()
torch.save([parameter.grad for parameter in parallel.parameters()], f"{folder}/gradients{rank}")
while len([name for name in os.listdir(folder) if name.startswith("gradients")]) < 2:
    time.sleep(0.01)
os._exit(0)
"""


def test_modules_train_in_parallel_processes(smooth: Any, tmp_path: Path) -> None:
    """DistributedDataParallel averages the gradients of two processes that each have half of the rows."""
    command = [sys.executable, "-c", _PARALLEL_TRAINING, smooth._client.target, smooth.name, tmp_path]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    w = W.clone().requires_grad_()
    (local(X, w)[1] / 2).backward()
    for rank in (0, 1):
        (found,) = torch.load(tmp_path / f"gradients{rank}")
        assert_equal(found, w.grad)


def test_third_derivatives_say_that_there_are_none(remote: Any) -> None:
    with pytest.raises(UnsupportedError, match="not third ones"):
        grad(lambda a: grad(lambda b: grad(lambda c: remote(X, c)[1])(b).sum())(a).sum())(W)


def test_values_that_are_no_tensors_may_change_after_the_call(smooth: Any) -> None:
    """They are read again by second derivatives."""
    w = W.clone().requires_grad_()

    def hessian(x: Any, change: Any) -> Any:
        (first,) = torch.autograd.grad(gradrule.torch.remote(smooth)(x=x, w=w)["z"], w, create_graph=True)
        change()
        return torch.autograd.grad(first.sum(), w)[0]

    wanted = hessian(X, lambda: None)
    array, rows = X.numpy().copy(), X.tolist()
    assert_equal(hessian(array, lambda: array.fill(0)), wanted)
    assert_equal(hessian(rows, rows.reverse), wanted)


def test_tensors_with_gradients_in_lists_are_refused(smooth: Any) -> None:
    rows = [row.clone().requires_grad_() for row in X]
    function = gradrule.torch.remote(smooth)
    with pytest.raises(InvalidDerivativeError, match=r"torch\.stack"):
        function(x=rows, w=W)
    with torch.no_grad():
        assert_equal(function(x=rows, w=W)["z"], local(X, W)[1])


def test_derivatives_that_pytorch_batches_itself_are_refused(remote: Any) -> None:
    w = W.clone().requires_grad_()
    y, _ = remote(X, w)
    with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap"):
        torch.autograd.grad(y, w, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)
    with pytest.raises(UnsupportedError, match=r"torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda w: remote(X, w)[0], W, vectorize=True)


def test_hessian_vector_products_of_pytorch_name_the_function_to_use(remote: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"functional\.vhp"):
        torch.autograd.functional.hvp(lambda w: remote(X, w)[1], W, W)
    _, found = torch.autograd.functional.vhp(lambda w: remote(X, w)[1], W, W)
    assert_equal(found, torch.autograd.functional.vhp(lambda w: local(X, w)[1], W, W)[1])


def test_inputs_of_a_module_that_are_given_twice_are_refused(smooth: Any) -> None:
    module = gradrule.torch.remote_module(smooth, w=W)
    for arguments, named in (((X,), {"x": X}), ((X,), {"w": W})):
        with pytest.raises(UnknownFeedError, match="given twice"):
            module(*arguments, **named)


def test_tensors_without_data_are_refused(smooth: Any) -> None:
    function = gradrule.torch.remote(smooth)
    with pytest.raises(UnsupportedError, match="to_dense"):
        function(x=X.to_sparse(), w=W)
    with pytest.raises(UnsupportedError, match="'meta'"):
        function(x=X.to("meta"), w=W)


def test_notes_are_warned_of_once(client: Any) -> None:
    """U1: the gradient of the sum of a softmax is 0."""
    g = gr.Graph()
    x = g.placeholder("x", "float64", [1, 4])
    g.reduce_sum(g.op_output("Softmax", x), axis=[0, 1], name="y")
    g.op("Softmax", x, name="p")
    program = client.compile(g, fetches=["y"], ys=["y"], xs=["x"])
    function, given = gradrule.torch.remote(program), torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    with pytest.warns(GradruleWarning, match="[Ss]oftmax"):
        function(x=given).backward()
    with pytest.warns(GradruleWarning, match="[Ss]oftmax"):
        gradrule.scipy.value_and_grad(program)(np.ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(x=given).backward()
        # Other upstream gradients than ones are not those of the sum.
        several = client.compile(g, fetches=["p"], ys=["p"], xs=["x"])
        y = gradrule.torch.remote(several)(x=given)
        (y * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
