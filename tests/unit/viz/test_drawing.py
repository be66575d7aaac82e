"""What pictures show equals the data; wrong arguments are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import gradrule as gr
from gradrule import viz
from gradrule._comparison.compare import ComparedRow
from gradrule.viz import _figures, _lines
from gradrule.viz._checking import Report, Slopes
from gradrule.viz._curves import Curve, Line
from gradrule.viz._slopes import InputClaim, Kink

X = np.linspace(-2, 2, 9)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


def axes() -> Any:
    return Figure().add_subplot()


def texts_inside(figure: Figure) -> None:
    """Asserts that titles and labels of all axes are within the figure."""
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    for ax in figure.axes:
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            box = text.get_window_extent()
            if text.get_text():
                assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, text.get_text()


def comparison(norms: dict[str, dict[str, float | None]], first: dict[str, str] | None = None) -> gr.Comparison:
    rows = [
        ComparedRow(tensor, "Op", tensor == "x", label, norm, None, None)
        for label, by_tensor in norms.items()
        for tensor, norm in by_tensor.items()
    ]
    found = {label: gr.FirstDifference(tensor, "Op", 0.5, ()) for label, tensor in (first or {}).items()}
    return gr.Comparison(tuple(norms), next(iter(norms)), {}, tuple(rows), found, {}, None, ())


def test_curve_has_a_labelled_line_for_op_and_gradient() -> None:
    values = np.where(X > 1, np.inf, X)
    curve = Curve("rule (a=1)", "x", X, (Line("Sign(x)", np.sign(X), "forward"), Line("dx, dy = 1", values)), ("note",))
    ax = axes()
    _lines.draw_curve(ax, curve)
    assert ax.get_title() == "rule (a=1)"
    assert ax.get_xlabel() == "input x\nnote"
    assert ax.get_ylabel() == "output of the op, and gradient dx"
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_array_equal(lines["Sign(x)"].get_ydata(), np.sign(X))
    np.testing.assert_array_equal(lines["dx, dy = 1"].get_ydata(), np.where(X > 1, np.nan, X))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["Sign(x)", "dx, dy = 1"]


@pytest.mark.parametrize("holds", [True, False])
def test_check_shows_the_verdict_and_both_lines(holds: bool) -> None:
    claim = InputClaim("x", 9, 0, 0.25, 0.5, 1.0, 1.0, 0.75, holds)
    kink = Kink(0.0, 0.0, 1.0, False, 0.5)
    report = Report("r", "expr:log1p(exp(x))", (-2, 2), (claim,), (kink,), (), (), (), None, ())
    ax = axes()
    _lines.draw_check(ax, report, Slopes(X, X * 2, X * 3))
    assert ("holds" in ax.get_title()) == holds and ("WRONG for x" in ax.get_title()) != holds
    assert "log1p(exp(x))" in ax.get_title() and "expr:" not in ax.get_title()
    labels = {line.get_label(): line for line in ax.lines}
    np.testing.assert_array_equal(labels["rule r"].get_ydata(), X * 2)
    np.testing.assert_array_equal(labels["finite differences of log1p(exp(x))"].get_ydata(), X * 3)
    assert ("largest difference: x = 0.5" in labels) != holds
    assert labels["kinks and jumps"].get_xdata()[0] == 0.0


def test_norms_of_zero_are_drawn_below_all_others() -> None:
    norms: dict[str, dict[str, float | None]] = {
        "default": {"a": 1.0, "b": 0.01, "x": 0.001},
        "cut": {"a": 1.0, "b": 0.0, "x": 0.0},
    }
    found = comparison(norms, {"cut": "b"})
    ax = found.plot()
    assert ax.get_yscale() == "symlog"
    drawn = [np.asarray(line.get_ydata(), float).tolist() for line in ax.lines if line.get_marker() != "None"]
    assert drawn == [[1.0, 0.01], [0.001], [1.0, 0.0], [0.0], [0.0]], "lines, xs, and the ring"
    assert ax.get_ylim()[0] < 0 and ax.get_ylim()[1] > 1
    assert ax.yaxis.get_major_formatter()(0.0, 0) == "exactly 0"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "x"]
    assert "ring" in ax.get_title()
    texts_inside(_figures.figure_of(ax))
    ax = comparison({"default": norms["default"]}).plot()
    assert ax.get_yscale() == "log"
    assert "ring" not in ax.get_title()


def test_a_missing_norm_is_a_gap() -> None:
    ax = comparison({"default": {"a": 1.0, "b": None, "x": 2.0}}).plot()
    line = next(line for line in ax.lines if line.get_label() == "default")
    np.testing.assert_array_equal(line.get_ydata(), [1.0, np.nan])


def test_tensors_are_drawn_by_their_shape() -> None:
    tensors = {
        "scalar": np.float32(2.5), "vector": np.array([[1.0], [-2.0]]), "matrix": np.arange(6.0).reshape(2, 3),
        "many": RNG.normal(size=1000), "none": None, "text": np.array([b"a"], object), "empty": np.zeros((0, 2)),
    }  # fmt: skip
    figure = viz.plot_tensors(tensors)
    titles = [ax.get_title().replace("\n", " ") for ax in figure.axes if ax.get_title()]
    assert titles == [
        "scalar float32 []", "vector float64 [2, 1]", "matrix float64 [2, 3]", "many float64 [1000]", "none",
        "text object [1]", "empty float64 [0, 2]",
    ]  # fmt: skip
    by_title: dict[str, Any] = {ax.get_title().split("\n")[0]: ax for ax in figure.axes}
    assert [text.get_text() for text in by_title["scalar"].texts] == ["2.5"]
    assert [bar.get_height() for bar in by_title["vector"].patches] == [1.0, -2.0]
    np.testing.assert_array_equal(by_title["matrix"].images[0].get_array(), np.arange(6.0).reshape(2, 3))
    steps = by_title["many"].patches[0].get_data()
    assert steps.values.sum() == 1000
    assert "mean" in by_title["many"].get_xlabel()
    texts_inside(figure)


def test_one_tensor_is_drawn_into_given_axes() -> None:
    ax = axes()
    assert viz.plot_tensors({"a": np.ones(3), "b": np.ones(2)}, "b", ax=ax) is ax.get_figure()
    assert ax.get_title() == "b\nfloat64 [2]"
    with pytest.raises(gr.errors.InvalidParamError, match="name="):
        viz.plot_tensors({"a": np.ones(3), "b": np.ones(2)}, ax=ax)
    with pytest.raises(gr.errors.UnknownTensorError, match="'c'"):
        viz.plot_tensors({"a": np.ones(3)}, "c")


def test_a_spike_makes_the_histogram_logarithmic() -> None:
    figure = viz.plot_tensors({"a": np.concatenate([np.zeros(10_000), RNG.normal(size=500), [np.nan]])})
    assert figure.axes[0].get_yscale() == "symlog"
    assert "exactly 0" in figure.axes[0].get_xlabel() and "1 are NaN" in figure.axes[0].get_xlabel()
    assert viz.plot_tensors({"a": RNG.normal(size=500)}).axes[0].get_yscale() == "linear"


def test_explanation_counts_nodes_by_rule() -> None:
    resolutions = [gr.Resolution(name, "Sign", rule, "l", status) for name, rule, status in (
        ("a", "ste", "active"), ("b", "ste", "off_path"), ("c", "half", "active"))]  # fmt: skip
    explanation = gr.Explanation(resolutions, ["d", "e"], [], {}, {}, {}, {}, [])
    ax = explanation.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ste", "half", "default"]
    bars: list[Any] = list(ax.patches)
    widths = [bar.get_width() for bar in bars]
    assert widths == [1, 1, 2, 1, 0, 0]


# Saliency.


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("channels", "axis"), [("last", -1), ("first", 1)], ids=["channels last", "channels first"]
)  # fmt: skip
def test_heat_map_reduces_channels(channels: Any, axis: int, signed: bool) -> None:
    shape = (2, 5, 4, 3) if channels == "last" else (2, 3, 5, 4)
    gradient = RNG.normal(size=shape).astype(np.float32)
    found = viz.heat_map(gradient, channels=channels, signed=signed)
    wide = gradient.astype(np.float64)
    wanted = wide.sum(axis=axis) if signed else np.abs(wide).max(axis=axis)
    np.testing.assert_allclose(found, wanted)
    assert viz.heat_map(gradient[0], channels=channels, signed=signed).shape == (1, 5, 4)


def test_heat_map_without_channels() -> None:
    gradient = RNG.normal(size=(5, 4))
    for channels in ("last", "first", "none"):
        np.testing.assert_array_equal(viz.heat_map(gradient, channels=channels), gradient[None])
    batch = RNG.normal(size=(2, 5, 4))
    np.testing.assert_array_equal(viz.heat_map(batch, channels="none", signed=False), np.abs(batch))


def test_saliency_draws_heat_on_a_symmetric_scale_cut_at_a_percentile() -> None:
    image, gradient = RNG.uniform(size=(2, 6, 5, 3)), RNG.normal(size=(2, 6, 5, 3))
    figure = viz.saliency(image, gradient, titles=["cat", "dog"], percentile=90)
    panels, bars = figure.axes[:4], figure.axes[4:]
    assert [panel.get_title() for panel in panels] == ["cat", "gradient", "dog", "gradient"]
    np.testing.assert_array_equal(panels[2].images[0].get_array(), image[1])
    heat = panels[3].images[1]
    np.testing.assert_allclose(heat.get_array(), gradient[1].sum(axis=-1))
    limit = np.percentile(np.abs(gradient[1].sum(axis=-1)), 90)
    assert heat.get_clim() == pytest.approx((-limit, limit))
    assert [bar.get_ylabel() for bar in bars] == ["gradient by the pixel\n(cut at 90 %)"] * 2
    texts_inside(figure)


def test_unsigned_saliency_starts_at_zero_and_fits_into_given_axes() -> None:
    image, gradient = RNG.integers(0, 256, (1, 6, 5)).astype(np.uint8), RNG.normal(size=(1, 6, 5))
    ax = axes()
    options: Any = {"signed": False, "channels": "first", "percentile": 100, "titles": "digit", "label": "relevance"}
    figure = viz.saliency(image, gradient, **options, ax=ax)
    assert figure is ax.get_figure() and ax.get_title() == "digit"
    assert ax.images[1].get_clim() == pytest.approx((0, np.abs(gradient).max()))
    assert figure.axes[1].get_ylabel() == "size of the relevance"


def test_a_gradient_of_zeros_or_nan_is_drawn() -> None:
    for value in (0.0, np.nan):
        figure = viz.saliency(np.ones((4, 4)), np.full((4, 4), value))
        assert figure.axes[1].images[1].get_clim() == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("image", "gradient", "words", "options"),
    [
        (np.ones((4, 4, 3)), np.ones((4, 5, 3)), "one shape", {}),
        (np.ones((3, 4, 5)), np.ones((3, 4, 5)), "channels='first'", {}),
        (np.ones(4), np.ones(4), "(height, width)", {}),
        (np.ones((4, 4)), np.ones((4, 4), complex), "real numbers", {}),
        (np.ones((4, 4)), np.ones((4, 4)), "percentile", {"percentile": 0}),
        (np.ones((4, 4)), np.ones((4, 4)), "'last', 'first' or 'none'", {"channels": "middle"}),
        (np.ones((4, 4)), np.ones((4, 4)), "columns", {"columns": 0}),
        (np.ones((2, 4, 4)), np.ones((2, 4, 4)), "2 titles", {"channels": "none", "titles": ["one"]}),
    ],
)
def test_arrays_that_are_no_images_are_refused(image: Any, gradient: Any, words: str, options: Any) -> None:
    with pytest.raises(gr.GradruleError) as refused:
        viz.saliency(image, gradient, **options)
    assert words in str(refused.value)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: viz.saliency(np.ones((4, 4)), np.ones((4, 4))), comparison({"default": {"x": 1.0}}).plot):
        with pytest.raises(gr.errors.UnsupportedError, match=r"gradrule\[plot\]"):
            draw()


def test_pictures_are_shown_once_and_belong_to_no_global_state() -> None:
    """As the value of a cell; pyplot would show them a second time, and keep them all."""
    pictures: list[Any] = [viz.saliency(X.reshape(3, 3), X.reshape(3, 3)), viz.plot_tensors({"x": X})]
    pictures.append(_figures.axes_or_new(None, 3, 2))
    for picture in pictures:
        assert picture._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("wrong", [[(0, 0)], [(0, 1), (0, 2), (2, 2)], list(np.ndindex(3, 3))], ids=len)
def test_gradients_that_are_not_finite_are_hatched_and_counted(wrong: list[tuple[int, int]]) -> None:
    gradient = np.ones((3, 3))
    for number, place in enumerate(wrong):
        gradient[place] = (np.nan, np.inf)[number % 2]
    figure = viz.saliency(np.zeros((3, 3)), gradient, beside=False)
    image, bar = figure.axes
    (hatched,) = image.patches
    assert hatched.get_hatch()
    inside = [place for place in np.ndindex(3, 3) if hatched.get_path().contains_point(place[::-1])]
    assert inside == sorted(wrong)
    assert f"{len(wrong)} of 9 pixels not finite: hatched" in bar.get_ylabel()
