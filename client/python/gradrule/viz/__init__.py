"""Draws rules, results, comparisons and gradients of images, in notebooks and scripts.

    from gradrule import viz

    viz.plot_rule(client, "atan")
    viz.saliency(image, result.gradients["x"])

Pictures need Matplotlib: `pip install 'gradrule[plot]'`. Each function draws into `ax` if that is given, else into a
new figure, which notebooks show as the value of a cell. It is none of pyplot: `pyplot.show()` shows only pictures that
were drawn into axes of pyplot, given as `ax`. `gradrule rules plot`, `rules check`, `rules gallery` and `compare` draw
the same pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradrule._builder.rules import EXPRESSION, Rule, RuleLike, named_or_rule
from gradrule._comparison.compare import Comparison
from gradrule._progress import Progress
from gradrule._results.call_results import Explanation, Result
from gradrule._results.rule_infos import RuleInfo, SampleResult
from gradrule.viz import _checking, _curves, _figures, _gallery, _images, _lines, _tensors
from gradrule.viz._gallery import Gallery
from gradrule.viz._images import Channels, heat_map
from gradrule.viz._setups import NoSetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradrule import Client
    from gradrule.common.tensor_codec import Array

__all__ = [
    "saliency", "heat_map", "plot_rule", "plot_check", "plot_comparison", "plot_tensors", "plot_explanation",
    "gallery", "Gallery",
]  # fmt: skip


def saliency(
    image: Array,
    gradient: Array,
    *,
    signed: bool = True,
    channels: Channels = "last",
    percentile: float = 99.0,
    titles: Sequence[str] | str = (),
    label: str = "gradient",
    beside: bool = True,
    columns: int = 4,
    ax: Axes | None = None,
) -> Figure:
    """Draws gradients of images as heat maps over the images, each with a colour bar.

    Args:
        image: One image, or a batch: shape (height, width, channels) or (n, height, width, channels) with 1, 3 or 4
            channels. (height, width) is one grey image in every layout. Numbers from 0 to 1 or 8-bit numbers are shown
            as they are, others are scaled to their range.
        gradient: Real numbers of the same shape, for example `result.gradients["x"]`. Pixels that are not finite are
            hatched, and counted beside the colour bar.
        signed: Sum the channels and show positive gradients red, negative ones blue, on a scale that is symmetric about
            0. If False: show the largest absolute value of the channels, from dark to bright (Simonyan et al., "Deep
            Inside Convolutional Networks", 2014, section 3.1).
        channels: `last`; `first`: (channels, height, width), as in PyTorch; `none`: (height, width).
        percentile: Percentile of the sizes of the gradients of an image at which its colours end, above 0, at most
            100: a few extreme pixels do not make all others pale.
        titles: One title for each image, or one for all.
        label: What the numbers are, for the colour bar: `gradient`, `relevance`.
        beside: Show each image also without heat map, left of it.
        columns: Number of images in a row.
        ax: Axes to draw the heat map of one image into.

    Returns:
        The figure.

    Raises:
        InvalidTensorError: An array is no image or batch of images, or the shapes differ.
        InvalidParamError: An argument is out of range.
        UnsupportedError: Matplotlib is not installed.
    """
    _figures.require_matplotlib()
    return _images.draw_saliency(
        image,
        gradient,
        signed=signed,
        channels=channels,
        percentile=percentile,
        titles=titles,
        label=label,
        beside=beside,
        columns=columns,
        ax=ax,
    )


def plot_rule(
    client: Client,
    rule: RuleLike | RuleInfo,
    *,
    op_type: str | None = None,
    others: tuple[Any, ...] = (),
    params: Mapping[str, Any] | None = None,
    interval: tuple[float, float] | None = None,
    dy: float = 1.0,
    over: _curves.Axis | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the output of an op and the gradient that a rule gives to it, as curves over x.

    Args:
        client: The synchronous client of the server that runs the rule.
        rule: A rule's name, a formula, a `gr.Rule`, or what `client.get_rule` returns.
        op_type: The op; default: the first of the rule's ops that maps one number to one number.
        others: Values of the further inputs x1, x2, ….
        params: Values of the rule's params by name.
        interval: Smallest and largest x; default: a range that suits the op, or (-3, 3).
        dy: The upstream gradient. A dashed line shows the gradient for -dy, unless it is just the negative.
        over: The horizontal axis, `x` or `dy`; default: `dy` for rules that depend on nothing else.
        ax: Axes to draw into.

    Returns:
        The axes.

    Raises:
        UnsupportedError: The rule is no function of one number, or Matplotlib is not installed.
        GradruleError: As in `client.sample_rule`.
    """
    _figures.require_matplotlib()
    chosen = _rule(client, rule)
    curve = _curves.curve(
        client, chosen, op_type=op_type, others=others, params=params, interval=interval, dy=dy, over=over
    )
    axes = _figures.axes_or_new(ax, 7, 4.2)
    _lines.draw_curve(axes, curve)
    return axes


def plot_check(
    client: Client,
    rule: RuleLike | RuleInfo,
    of: RuleLike | None = None,
    *,
    op_type: str | None = None,
    others: tuple[Any, ...] = (),
    params: Mapping[str, Any] | None = None,
    interval: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the gradient of a rule over finite differences of the function whose gradient it should be.

    Args:
        client: As in `plot_rule`.
        rule: As in `plot_rule`.
        of: The op type (`"Softplus"`) or formula (`"log1p(exp(x))"`) to compare with; default: the op of a rule that
            the registry calls a true gradient.
        op_type: As in `plot_rule`.
        others: As in `plot_rule`.
        params: As in `plot_rule`.
        interval: As in `plot_rule`.
        ax: Axes to draw into.

    Returns:
        The axes; the title says whether all differences are within the tolerance, 1e-5.

    Raises:
        UnsupportedError: There is no function to compare with, or the rule uses several elements at once.
        GradruleError: As in `client.sample_rule`.
    """
    _figures.require_matplotlib()
    function = None if of is None else named_or_rule(of)
    text = f"{EXPRESSION}{function.expression}" if isinstance(function, Rule) else function
    report, lines = _checking.check(client, _rule(client, rule), text, op_type, others, dict(params or {}), interval)
    if lines is None:
        why = "; ".join(report.notes) or "the registry does not call the rule a true gradient: give of=…"
        raise NoSetupError(f"there is no function to compare {report.rule} with: {why}")
    axes = _figures.axes_or_new(ax, 7.5, 4.4)
    _lines.draw_check(axes, report, lines)
    return axes


def plot_comparison(comparison: Comparison, *, ax: Axes | None = None) -> Axes:
    """Draws the norm of each tensor's upstream gradient under each override map.

    Args:
        comparison: What `client.compare` returns.
        ax: Axes to draw into.

    Returns:
        The axes. Norms are on a logarithmic axis; norms of exactly 0 are in a grey band below all others.

    Raises:
        UnsupportedError: Matplotlib is not installed.
    """
    axes = _figures.axes_or_new(ax, *_lines.comparison_size(comparison))
    _lines.draw_comparison(axes, comparison)
    return axes


def plot_tensors(
    tensors: Result | SampleResult | Mapping[str, Any], name: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """Draws outputs and gradients, one panel each: vectors of up to 64 elements as bars, matrices as heat maps, others
    as histograms.

    Args:
        tensors: A result, or arrays by name. At most 12 are drawn.
        name: Draw this tensor only.
        ax: Axes to draw one tensor into.

    Returns:
        The figure.

    Raises:
        UnknownTensorError: There is no tensor `name`.
        InvalidParamError: `ax` is given for several tensors.
        UnsupportedError: Matplotlib is not installed.
    """  # the first sentence is long
    _figures.require_matplotlib()
    return _tensors.draw_tensors(_tensors.tensors_of(tensors), name, ax)


def plot_explanation(explanation: Explanation, *, ax: Axes | None = None) -> Axes:
    """Draws how many nodes each rule got.

    Args:
        explanation: What `client.explain` returns.
        ax: Axes to draw into.

    Returns:
        The axes: one bar for each rule.

    Raises:
        UnsupportedError: Matplotlib is not installed.
    """
    rules = {item.rule for item in explanation.overrides}
    axes = _figures.axes_or_new(ax, 6.5, 1.6 + 0.35 * (len(rules) + 1))
    _tensors.draw_explanation(axes, explanation)
    return axes


def gallery(client: Client, *, progress: Progress = None) -> Gallery:
    """Returns a page with every builtin rule: curve, formula, params, source, example.

    Args:
        client: The synchronous client of the server that runs the rules.
        progress: As in `client.compile`; reports the rules that are drawn.

    Returns:
        The page, which notebooks display; `.save(folder)` writes `index.html`.

    Raises:
        GradruleError: As in `client.list_rules`.
    """
    return _gallery.page(client, progress=progress)


def _rule(client: Client, rule: RuleLike | RuleInfo) -> RuleInfo | Rule:
    chosen = rule if isinstance(rule, RuleInfo) else named_or_rule(rule)
    return client.get_rule(chosen) if isinstance(chosen, str) else chosen
