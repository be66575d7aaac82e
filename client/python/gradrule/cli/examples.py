"""Adds examples to the help of each command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

EXAMPLES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("health",): ("gradrule health", "gradrule health --target gpu-host:8470 --tls-ca ca.pem"),
    ("status",): ("gradrule status", "gradrule status --once --json"),
    ("rules", "list"): (
        "gradrule rules list",
        "gradrule rules list --family surrogate",
        "gradrule rules list --search relu",
    ),
    ("rules", "show"): ("gradrule rules show ste_sign",),
    ("rules", "presets"): ("gradrule rules presets", "gradrule rules presets epsilon_plus"),
    ("rules", "create"): (
        "gradrule rules create HalfGrad '0.5 * dy'",
        "gradrule rules create Scaled 'a * dy' --param a=0.5 --description 'Scales the gradient.'",
        "gradrule rules create HalfGrad '0.25 * dy' --replace",
        "gradrule rules create FromGraph --graph rule.pb",
        "gradrule rules create FromFile - < formula.txt",
    ),
    ("rules", "delete"): ("gradrule rules delete HalfGrad",),
    ("rules", "sample"): (
        "gradrule rules sample ste_sign --feed 'x=[-2, 0.5, 3]' --feed 'dy=[1, 1, 1]'",
        "gradrule rules sample 'expr:a * dy' --param a=2 --feed 'x=[1]' --feed 'dy=[4]'",
    ),
    ("rules", "plot"): ("gradrule rules plot ste_sign", "gradrule rules plot atan --param alpha=4 --output atan.png"),
    ("rules", "gallery"): ("gradrule rules gallery gallery",),
    ("rules", "check"): (
        "gradrule rules check safe_sqrt --of Sqrt",
        "gradrule rules check 'dy * sigmoid(x)' --of Softplus",
    ),
    ("programs", "compile"): ("gradrule programs compile graph.pb --y y --x x --override Sign=ste_sign --name model",),
    ("programs", "list"): ("gradrule programs list",),
    ("programs", "show"): ("gradrule programs show model",),
    ("programs", "delete"): ("gradrule programs delete model",),
    ("evaluate",): (
        "gradrule evaluate graph.pb --feed 'x=[-2, 0.5, 3]' --fetch y --y y --x x --override Sign=ste_sign",
        "gradrule evaluate programs/model --feed 'x=[-2, 0.5, 3]' --param Sign.clip=2 --json",
        "gradrule evaluate model.keras --feed x=image.npy --y loss --x x --preset epsilon_plus --out result.npz",
        "cat graph.json | gradrule evaluate - --feed 'x=[1, 2]' --fetch y",
    ),
    ("explain",): (
        "gradrule explain graph.pb --y y --x x --override Sign=ste_sign",
        "gradrule explain graph.pb --y y --x x --override @activation=guided_relu --html graph.html",
    ),
    ("compare",): (
        "gradrule compare graph.pb --feed 'x=[-2, 0.5, 3]' --y y --x x --map ste=Sign=ste --map clipped=Sign=ste_sign",
        "gradrule compare model.keras --feed x=image.npy --y loss --x x --preset lrp=epsilon_plus --output norms.png",
    ),
    ("sweep",): (
        "gradrule sweep graph.pb --feed x=image.npy --y y --x x --map own= --map ste=Sign=ste --map atan=Sign=atan",
        "gradrule sweep graph.pb --feed x=image.npy --y y --x x --map ste=Sign=ste_sign --param 'Sign.clip=[1, 2]'",
        "gradrule sweep model.keras --feed x=image.npy --y loss --x x --preset lrp=epsilon_plus --out maps.npz",
    ),
    ("gateway",): ("gradrule gateway", "gradrule gateway --server gpu-host:8470 --tls-ca ca.pem --port 8480"),
    ("demo",): ("gradrule demo --out out/demo",),
    ("completion",): (
        "gradrule completion bash > ~/.local/share/bash-completion/completions/gradrule",
        "gradrule completion zsh > ~/.zfunc/_gradrule",
        "gradrule completion fish > ~/.config/fish/completions/gradrule.fish",
    ),
}
"""Complete commands by the words of the command. Commands of the server have their own help."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the examples to the parsers of the commands."""
    for command, below in leaves(parser):
        if command in EXAMPLES:
            below.formatter_class = parser.formatter_class
            below.epilog = "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[command])])


def leaves(
    parser: argparse.ArgumentParser, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yields the words of each command, and its parser."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield above, parser
    for group in groups:
        for name, below in group.choices.items():
            yield from leaves(below, (*above, name))
