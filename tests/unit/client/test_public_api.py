"""Checks the public Python API: documented arguments, few positional parameters, short reprs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule import optimizers, schedules
from gradrule._builder.notebook_text import MAX_REPR_CHARACTERS, html_table, short_repr
from gradrule._comparison.compare import ComparedRow
from gradrule._messages.program_calls import ProgramBase
from gradrule._results import call_results
from gradrule.errors import Detail
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule.v1.tensor_pb2 import Dt

MOST_POSITIONAL = 3
SKIPPED_PARAMETERS = {"self", "cls"}
# Users get these objects from functions and never call the constructor.
RETURNED = {
    *("gr.Client", "gr.Program", "gr.ForwardHandle", "gr.AsyncForwardHandle", "gr.Session", "gr.AsyncSession"),
    *("gr.TensorHandle", "gr.Node", "gr.Result", "gr.SweepResult"),
}
# Keras calls these methods of every layer, and documents them.
KERAS_HOOKS = {"build", "call", "compute_mask", "compute_output_shape", "compute_output_spec", "from_config"}

PUBLIC = {
    **{f"gr.{name}": getattr(gr, name) for name in gr.__all__ if callable(getattr(gr, name))},
    **{f"gr.optimizers.{name}": getattr(optimizers, name) for name in optimizers.__all__},
    **{f"gr.schedules.{name}": getattr(schedules, name) for name in schedules.__all__},
    **{f"gr.keras.{name}": getattr(gr.keras, name) for name in gr.keras.__all__},
    **{f"gr.viz.{name}": getattr(gr.viz, name) for name in gr.viz.__all__},
}


def callables() -> Iterator[tuple[str, Any, bool]]:
    """Yields name, callable, and whether the callable is a class, of everything public."""
    for name, value in PUBLIC.items():
        yield name, value, inspect.isclass(value)
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for member in dir(value):
            found = inspect.getattr_static(value, member)
            if member.startswith("_") or isinstance(found, property):
                continue
            function = getattr(value, member)
            module = getattr(function, "__module__", None) or ""
            if name == "gr.keras.RemoteLayer" and member in KERAS_HOOKS:
                continue
            if inspect.isroutine(function) and module.startswith("gradrule") and not module.startswith("gradrule.v1"):
                yield f"{name}.{member}", function, False


CALLABLES = {name: (value, is_class) for name, value, is_class in callables()}


def parameters(value: Any) -> list[inspect.Parameter]:
    found = inspect.signature(value).parameters.values()
    return [parameter for parameter in found if parameter.name not in SKIPPED_PARAMETERS]


def documented(doc: str, headings: str) -> set[str]:
    """Returns the names in the sections of a Google-style docstring with these headings."""
    names: set[str] = set()
    for section in re.findall(rf"^(?:{headings}):\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(doc), re.MULTILINE):
        for line in re.findall(r"^ {4}([\w*`, ]+?)(?: \([^)]*\))?:", section, re.MULTILINE):
            names |= {word.strip("*` ") for word in line.split(",")}
    return names


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_documented(name: str) -> None:
    value, is_class = CALLABLES[name]
    assert value.__doc__, f"{name} has no docstring"
    if name in RETURNED or (is_class and issubclass(value, Exception)):
        return
    headings = "Args|Attributes" if is_class else "Args"
    doc = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in value.__mro__) if is_class else value.__doc__
    wanted = {parameter.name for parameter in parameters(value)}
    missing = wanted - documented(doc, headings)
    assert not missing, f"{name} does not document {sorted(missing)}"


@pytest.mark.parametrize("name", [name for name, (_, is_class) in CALLABLES.items() if not is_class])
def test_parameters_after_the_third_are_keyword_only(name: str) -> None:
    positional = [
        parameter.name
        for parameter in parameters(CALLABLES[name][0])
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    assert len(positional) <= MOST_POSITIONAL, f"{name} takes {positional} by position"


HOSTILE = "<script>alert('x')</script>&"
LONG = "layer/" * 60


def resolution(name: str) -> gr.Resolution:
    return gr.Resolution(name, "Relu", name, name, "active")


def result(name: str) -> gr.Result:
    message = evaluate_pb2.EvaluateResponse()
    for field in (message.outputs, message.outputs):
        field.add(name=name).value.inline_tensor.dtype = Dt.DT_FLOAT
    message.gradients.add(x=name).dense.dtype = Dt.DT_FLOAT
    message.overrides.add(node=name, op_type="Relu", rule=name, label=name, status=1)
    return call_results.result(message.SerializeToString())


def explanation(name: str, *, findings: bool = False) -> gr.Explanation:
    response = program_pb2.CompileProgramResponse()
    response.program.overrides.add(node=name, op_type="Relu", rule=name, label=name, status=1)
    response.program.ys.add(name=name, dtype=1)
    found = call_results.explanation(response)
    if findings:
        found.findings.append(Detail("UNKNOWN_RULE", name, name))
    return found


def comparison(name: str) -> gr.Comparison:
    row = ComparedRow(name, "Relu", True, name, 1.0, None, None)
    return gr.Comparison((name,), name, {name: {}}, (row,), {name: None}, {}, None, ())


def program(name: str) -> ProgramBase:
    message = program_pb2.Program(name=f"programs/{name}")
    message.inputs.add(name=name, dtype=1)
    message.overrides.add(node=name, op_type="Relu", rule=name, label=name, status=1)
    return ProgramBase(message)


SHOWN: dict[str, Any] = {
    "Result": result,
    "Explanation": explanation,
    "Explanation with findings": lambda name: explanation(name, findings=True),
    "Comparison": comparison,
    "Rule": lambda name: gr.Rule(name, params={name: 1.0}),
    "Program": program,
}


@pytest.mark.parametrize("kind", SHOWN)
def test_html_of_a_hostile_name_is_escaped(kind: str) -> None:
    html = SHOWN[kind](HOSTILE)._repr_html_()
    assert html.startswith('<div class="gradrule"><style>') and html.endswith("</div>") and "<table>" in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;" in html
    assert "<script" not in html


REPRS: dict[str, Any] = {
    **SHOWN,
    "Graph": lambda name: gr.Graph(),
    "TensorHandle": lambda name: gr.Graph().placeholder(name.strip("/"), "float32"),
    "Node": lambda name: gr.Graph().placeholder(name.strip("/"), "float32").node,
    "Override": lambda name: gr.Override(name, node=name),
    "Preset": gr.Preset,
    "Region": lambda name: gr.Region(name, name),
    "Resolution": resolution,
    "Digests": lambda name: gr.Digests("0" * 64, "1" * 64),
    "Sparse": lambda name: gr.Sparse(np.ones((3, 2)), np.arange(3), np.array([10**6, 2])),
    "FiniteDifferences": lambda name: gr.FiniteDifferences({name: None}, {}, {}, "float64", name),
    "ComparedRow": lambda name: comparison(name).rows[0],
    "SampleResult": lambda name: gr.SampleResult({name: np.ones(1000)}, {}),
    "ParamInfo": lambda name: gr.ParamInfo(name, np.ones(1000), name, name),
    "PresetInfo": lambda name: gr.PresetInfo(name, name, name, (name,), ()),
    "Blob": lambda name: gr.Blob(np.ones((1000, 1000))),
}


@pytest.mark.parametrize("kind", REPRS)
def test_reprs_fit_a_line(kind: str) -> None:
    text = repr(REPRS[kind](LONG))
    assert len(text) <= MAX_REPR_CHARACTERS
    assert "\n" not in text
    assert " object at 0x" not in text


def test_short_repr_keeps_the_closing_bracket() -> None:
    assert short_repr("<Rule a>") == "<Rule a>"
    cut = short_repr(f"<Rule {LONG}>")
    assert cut.endswith("…>")
    assert len(cut) == MAX_REPR_CHARACTERS


def test_long_tables_say_how_many_rows_are_left_out() -> None:
    html = html_table("Numbers", ("number",), [(number,) for number in range(120)])
    assert html.count("<tr>") == 52
    assert "… 70 more rows" in html
