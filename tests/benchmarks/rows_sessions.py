"""Rows of sessions and small calls against Keras in one process: training steps, remote layers, gradients of loops."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.benchmarks.context import Against, Bench, cpu_rows, measured, rows, used_by_part
from tests.benchmarks.measure import Line


@dataclass(frozen=True)
class Pair:
    """Two contenders with one model. weight: how many times as long a call takes as a tiny one, so that fewer are made.

    bar: the most that the ratio of processor time may be.
    """

    ours: str
    theirs: str
    model: str
    what: str
    peer: str
    weight: int
    bar: float | None


_KERAS = "Keras, train_on_batch"
PAIRS = (
    Pair("training session", "keras", "dense", "step of two Dense layers", _KERAS, 1, 2.0),
    Pair("training session", "keras", "cnn", "step of a small convolutional network", _KERAS, 10, None),
    Pair("training session", "keras", "resnet50", "step of a ResNet50", _KERAS, 40, 1.05),
    Pair("remote layer", "local layer", "cnn", "step with a RemoteLayer", "the same layers here", 10, 1.2),
    Pair("gradient", "local gradient", "lstm", "gradient of an LSTM, 50 steps", "tf.function", 2, 1.1),
)


def sessions(bench: Bench) -> list[Line]:
    """Each pair of contenders makes the same model."""
    made: list[Line] = []
    for pair in PAIRS:
        calls = max(2, bench.counts.tiny_calls // pair.weight)
        with bench.contenders() as start:
            contenders = {kind: start(kind, pair.model) for kind in (pair.ours, pair.theirs)}
            counts = replace(bench.counts, budget_s=4 * bench.counts.budget_s)
            found = measured(contenders, counts, calls=calls, warm_up=calls)
        against = Against(pair.ours, pair.theirs, pair.what, pair.peer)
        made += rows("sessions", found, [against])
        cpu = replace(against, work=f"processor time of a {pair.what}", bar=pair.bar)
        made += cpu_rows("sessions", found, [cpu], note=used_by_part(found[pair.ours]))
    return made
