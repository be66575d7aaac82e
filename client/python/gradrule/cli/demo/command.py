"""Implements `gradrule demo`: starts a server, trains networks, writes two pictures and a line of JSON."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradrule import _progress
from gradrule.cli import output
from gradrule.cli.failures import missing_extra
from gradrule.cli.output import Screen

if TYPE_CHECKING:
    from gradrule import Client
    from gradrule.cli.demo.data import Digits
    from gradrule.cli.demo.training import TrainingOptions, TrainingResult

_LINES = 5

Report = Callable[[int, float, float], None]
RULE = {"Sign": "ste_sign"}
_EPOCHS = 20
_RELU_EPOCHS = 8


@contextlib.contextmanager
def _shown(screen: Screen, title: str, total: int) -> Iterator[Report]:
    """Yields the function to call after each step, with the number of steps, the loss and the latest test accuracy."""
    if not output.shows_progress():

        def line(done: int, loss: float, accuracy: float) -> None:
            if done == total or done % max(total // _LINES, 1) == 0:
                screen.print(f"{title}: step {done}/{total}, loss {loss:.3f}, test accuracy {accuracy:.3f}")

        yield line
        return
    with _progress.start(True, title, total, "steps") as task:
        yield lambda done, loss, accuracy: task.advance(loss=loss, accuracy=accuracy)


def add(commands: Any) -> None:
    """Adds the command `demo` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train a binary network on handwritten digits through a server, with a rule and without",
        description="Starts a server of its own, trains a network with sign activations and binary weights on "
        "handwritten digits twice, with TensorFlow's gradient of Sign and with the rule ste_sign. Then trains a second "
        "network on printed digits and draws which pixels determine its result (guided backpropagation). The last line "
        "is a JSON object.",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out/demo"), help="folder for the pictures [default: out/demo]"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split, the weights and the batches [default: 0]"
    )
    parser.add_argument(
        "--epochs",
        type=_epochs,
        default=_EPOCHS,
        help=f"epochs of each training of the binary network [default: {_EPOCHS}]",
    )
    parser.add_argument("--device", default="auto", help="device of the server: auto, cpu or gpu:N [default: auto]")
    parser.set_defaults(run=run)


def _epochs(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    screen = output.console()
    try:
        import matplotlib  # noqa: F401  # checks that it is installed
    except ModuleNotFoundError as cause:
        raise missing_extra(f"the demo is not complete ({cause.name} is missing)", "demo") from None
    import gradrule as gr
    from gradrule.cli.demo import data

    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    digits = data.load(options.seed)
    screen.print("starting a server …")
    with gr.local(device=options.device) as client:
        screen.print(f"server at {client.target}, ready after {time.perf_counter() - started:.1f} s")
        summary = _train_and_draw(screen, client, digits, options)
    output.print_json({**summary, "seconds": round(time.perf_counter() - started, 2)})
    return 0


def _train_and_draw(
    screen: output.Screen, client: Client, digits: Digits, options: argparse.Namespace
) -> dict[str, object]:
    from gradrule.cli.demo import pictures
    from gradrule.cli.demo.data import PRINTED_SIDE, draw_printed
    from gradrule.cli.demo.networks import binary_network, relu_network
    from gradrule.cli.demo.training import TrainingOptions

    def train(
        title: str, network: Any, data: Digits, training_options: TrainingOptions, overrides: dict[str, str] | None
    ) -> TrainingResult:
        return _train(screen, client, title, network, data, training_options, overrides, options.seed)

    binary = TrainingOptions(options.epochs, learning_rate=0.03, weight_limit=1.0)
    default = train("binary network, own gradient", binary_network(options.seed), digits, binary, None)
    rule = train("binary network, ste_sign", binary_network(options.seed), digits, binary, RULE)
    printed = draw_printed(options.seed)
    relu = relu_network(options.seed, PRINTED_SIDE)
    explained = train("ReLU network", relu, printed, TrainingOptions(_RELU_EPOCHS, learning_rate=0.003), None)

    curves_path = options.out / "learning_curves.png"
    pictures.learning_curves({"TensorFlow's gradient of Sign": default, "rule ste_sign": rule}, curves_path)
    chosen = pictures.one_of_each(printed)
    x, labels = printed.test_x[chosen], printed.test_labels[chosen]
    plain, guided = pictures.gradients(client, relu, explained.weights, x, labels)
    saliency_path = options.out / "saliency.png"
    pictures.saliency({"digit": x, "gradient": plain, "rule guided_relu": guided}, labels, saliency_path)

    rows = [
        ["binary, signs everywhere", "TensorFlow's own (zero)", *_result_cells(default)],
        ["binary, signs everywhere", "Sign → ste_sign", *_result_cells(rule)],
        ["ReLU, floats, printed digits", "TensorFlow's own", *_result_cells(explained)],
    ]
    output.table(screen, "test digits", ("network", "gradient", "test accuracy", "steps", "steps/s"), rows)
    screen.print(f"pictures: {curves_path}, {saliency_path}")
    steps = len(default.losses) + len(rule.losses)
    return {
        "accuracy_default": round(default.accuracy, 4),
        "accuracy_rule": round(rule.accuracy, 4),
        "accuracy_relu": round(explained.accuracy, 4),
        "steps": steps,
        "steps_per_second": round(steps / (default.seconds + rule.seconds), 1),
        "device": rule.device,
        "seed": options.seed,
        "learning_curves": str(curves_path),
        "saliency": str(saliency_path),
    }


def _train(
    screen: output.Screen,
    client: Client,
    title: str,
    network: Any,
    digits: Digits,
    training_options: TrainingOptions,
    overrides: dict[str, str] | None,
    seed: int,
) -> TrainingResult:
    from gradrule.cli.demo.training import train

    with _shown(screen, title, training_options.steps(digits)) as report:
        return train(client, network, digits, training_options, overrides=overrides, seed=seed, progress=report)


def _result_cells(run: TrainingResult) -> list[str]:
    return [f"{run.accuracy:.3f}", str(len(run.losses)), f"{len(run.losses) / run.seconds:.0f}"]
