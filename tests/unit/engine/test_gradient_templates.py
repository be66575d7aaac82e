"""Tests that a build gives the same whatever was built before it: gradients that are reused fit where they are used.

Each program is built three times: after all programs of its sequence before it, alone, and with nothing reused at all,
not even between its own nodes. All three must give the same bits, statuses, types and errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import gradrule as gr
from tests.samples import size
from tests.service.map_sequences import Map, sequence
from tests.unit.engine.map_builds import Outcome, outcome

try:
    from gradrule_server.engine.gradient_templates import TEMPLATES
except ImportError:
    TEMPLATES = None  # type: ignore[assignment]


@contextlib.contextmanager
def nothing_reused() -> Iterator[None]:
    """Makes each gradient anew within the context."""
    if TEMPLATES is None:
        yield
        return

    def make_anew(key: Any, node: str, outer: Sequence[Any], make: Callable[[], Any], is_pure: Any) -> Any:
        return make()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TEMPLATES, "gradients", make_anew)
        yield


def clear() -> None:
    """Forgets what earlier builds of this process left."""
    if TEMPLATES is not None:
        TEMPLATES.clear()


def check(graph: gr.Graph, feeds: dict[str, Any], maps: Sequence[Map], what: str) -> list[Outcome]:
    """Asserts that each map gives the same after the others, alone and with nothing reused; returns the outcomes."""
    with nothing_reused():
        wanted = [outcome(graph, feeds, item) for item in maps]
    after = [outcome(graph, feeds, item) for item in maps]
    faults = []
    for number, item in enumerate(maps):
        clear()
        alone = outcome(graph, feeds, item)
        for how, found in (("after the others", after[number]), ("alone", alone)):
            for fault in found.differences(wanted[number]):
                faults.append(f"{what}, map {number} {how}: {fault}\n  {item}")
    assert not faults, "\n".join(faults[:6])
    return wanted


@pytest.mark.parametrize("number", range(size(12, 400)))
def test_sequences_of_maps(number: int) -> None:
    """What earlier sequences of this process left is kept: graphs meet each other's gradients too."""
    item = sequence(number, 6)
    check(item.graph, item.feeds, item.maps, f"sequence {number}")
