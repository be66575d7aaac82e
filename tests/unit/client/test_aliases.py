"""Tests aliases of tensors in requests and results."""

from __future__ import annotations

from typing import Any

import pytest

import gradrule as gr
from gradrule._builder.specs import LayerCall
from gradrule._messages import call_arguments, request_messages, rpc_calls
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.request_encoding import RequestEncoder
from gradrule._results import call_results
from gradrule.common.tensor_codec import to_message
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2
from tests.unit.client.plain_requests import plain

FLOAT = tensor_pb2.DT_FLOAT


def aliased() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2])
    g.identity(g.sign(x, name="y"), name="z")
    g.aliases.update(image="x", score="z", inner="y:0")
    return g


def spec(graph: Any, **words: Any) -> program_pb2.ProgramSpec:
    return request_messages.program_spec(graph, call_arguments.ProgramArguments(**words))[0]


def test_inputs_and_outputs_go_by_aliases() -> None:
    g = aliased()
    assert list(g.inputs) == ["image"]
    assert g.inputs["x"] == g.inputs["image"] == gr.TensorSpec("x", "float32", (2,))
    assert list(g.outputs) == ["score", "inner"]
    assert g.outputs["z"] == g.outputs["score"]
    assert g.tensor("score").name == "z:0"


def test_unknown_tensors_list_the_aliases() -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match=r"Did you mean 'score'.*Aliases: 'image', 'score', 'inner'"):
        aliased().tensor("scor")


def test_every_argument_accepts_aliases() -> None:
    override = gr.Override("default", region=gr.Region(inputs=["image"], outputs=["inner"]))
    made = spec(
        aliased(), fetches=["score"], ys="score", xs=["image"], grad_ys={"score": "inner"}, stop_gradients=["inner"],
        overrides=[override],
    )  # fmt: skip
    assert list(made.fetches) == ["z"]
    assert (list(made.vjp.ys), list(made.vjp.xs), list(made.vjp.stop_gradients)) == (["z"], ["x"], ["y:0"])
    assert [(item.y, item.tensor) for item in made.vjp.grad_ys] == [("z", "y:0")]
    region = made.overrides[0].selector.region
    assert (list(region.inputs), list(region.outputs)) == (["x"], ["y:0"])
    assert dict(made.aliases) == {"image": "x", "score": "z", "inner": "y:0"}
    # The override is the caller's, and serves another graph just as well.
    assert list(override.message().selector.region.inputs) == ["image"]


def test_feeds_take_the_type_of_the_aliased_tensor() -> None:
    g = aliased()
    request = plain(RequestEncoder(g, request_messages.types_of_graph(g)).encode({"feeds": {"image": [1, 2]}}))
    assert [(feed.name, feed.value.inline_tensor.dtype) for feed in request.feeds] == [("x", FLOAT)]


def response() -> bytes:
    value = tensor_pb2.TensorSource(inline_tensor=to_message([1.0]))
    return evaluate_pb2.EvaluateResponse(
        outputs=[tensor_pb2.NamedTensor(name="z", value=value), tensor_pb2.NamedTensor(name="y:0", value=value)],
        gradients=[evaluate_pb2.Gradient(x="x", dense=to_message([2.0]))],
    ).SerializeToString()


@pytest.mark.parametrize(
    ("fetches", "xs", "keys"),
    [
        (["score", "inner"], ["image"], (["score", "inner"], ["image"])),
        (["z", "y:0"], ["x"], (["z", "y:0"], ["x"])),
    ],
)
def test_results_are_named_as_in_the_request(fetches: list[str], xs: list[str], keys: Any) -> None:
    words = call_arguments.ProgramArguments(fetches=fetches, ys="score", xs=xs)
    call = rpc_calls.evaluate(request_messages.sent_graph(aliased()), None, None, words)
    result = call.decode(call.answer(response()))
    assert (list(result.outputs), list(result.gradients)) == keys
    for name in ("z", "score", "z:0"):
        assert result.outputs[name] == 1
    for name in ("x", "image"):
        assert result.gradients[name] == 2
        assert result.gradient_kinds[name] == "dense"
    assert "none" not in result.outputs


def test_programs_accept_their_aliases() -> None:
    specs = {name: tensor_pb2.TensorSpec(name=name, dtype=FLOAT) for name in "xz"}
    message = program_pb2.Program(
        name="programs/p", inputs=[specs["x"]], outputs=[specs["z"]], ys=[specs["z"]], xs=[specs["x"]],
        aliases={"image": "x", "score": "z"},
    )  # fmt: skip
    request: Any = ProgramBase(message)._call({"image": [1.0]}, None, {"score": [2]}).request
    request = plain(request)
    assert [feed.name for feed in request.feeds] == ["x"]
    assert [item.name for item in request.grad_ys] == ["z"]
    found = call_results.specs(message.inputs, message.aliases)
    assert list(found) == ["image"]
    assert found["x"].name == "x"


def layered() -> gr.Graph:
    """Has the layers `image` (also a node), `encoder/conv`, `twice` (two calls) and `pair` (two outputs)."""
    g = gr.Graph()
    x = g.placeholder("image", "float32", [2])
    y = g.sign(x, name="encoder/conv/Sign")
    g.identity(y, name="head/Identity")
    g.aliases["score"] = "head/Identity"
    for path, outputs in (
        ("image", ("encoder/conv/Sign",)),
        ("encoder/conv", ("encoder/conv/Sign",)),
        ("twice", ("encoder/conv/Sign",)),
        ("twice", ("head/Identity",)),
        ("pair", ("encoder/conv/Sign", "head/Identity")),
    ):
        g.layers.append(LayerCall(path, object, (), outputs, 0))
    return g


def test_layers_name_their_outputs_in_every_argument() -> None:
    g = layered()
    override = gr.Override("default", region=gr.Region(inputs=["image"], outputs=["encoder/conv"]))
    made = spec(
        g, fetches=["encoder/conv"], ys="score", xs={"hidden": ["encoder/conv"]}, grad_ys={"score": "encoder/conv"},
        stop_gradients=["encoder/conv"], overrides=[override],
    )  # fmt: skip
    conv = "encoder/conv/Sign"
    assert (list(made.fetches), list(made.vjp.xs), list(made.vjp.stop_gradients)) == ([conv], [conv], [conv])
    assert made.vjp.grad_ys[0].tensor == conv
    assert list(made.overrides[0].selector.region.outputs) == [conv]
    assert dict(made.aliases) == {"score": "head/Identity", "encoder/conv": conv}
    assert g.tensor("encoder/conv").name == f"{conv}:0"
    arguments = call_arguments.ProgramArguments(fetches=[conv, "encoder/conv"])
    assert next(iter(call_arguments.given_aliases(g, arguments))) == conv
    assert list(spec(g, fetches=["image"]).fetches) == ["image"], "a node comes before a layer"


@pytest.mark.parametrize("layer", ["twice", "pair"])
def test_layers_with_several_outputs_are_refused(layer: str) -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match=rf"{layer}'.*'encoder/conv/Sign', 'head/Identity'"):
        spec(layered(), fetches=[layer])


class Variable:
    """Looks like a variable of Keras."""

    dtype, path = "float32", "encoder/conv/kernel"


@pytest.mark.parametrize("xs", [Variable(), [Variable()]])
def test_variables_are_named_as_in_the_graph(xs: Any) -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match=r"as in graph.variables, perhaps 'encoder/conv/kernel'"):
        spec(layered(), ys="score", xs=xs)


def test_unknown_tensors_suggest_layers() -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match="Did you mean 'encoder/conv'"):
        layered().tensor("encoder/con")
