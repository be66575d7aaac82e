"""Writes pages of explained graphs into a folder, for the tests of `client/console` in a browser."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gradrule import _picture
from gradrule._picture.page import data
from tests.unit.client.picture.made import explained, large_explained, layered_explained, nested, took
from tests.unit.client.picture.test_page import hostile


def main(folder: Path) -> None:
    overrides = [
        took("loop/s", "ste_sign", function="body"),
        took("aside", "guided_relu", "off_path", op="Relu"),
        took("pred", "cosine", "not_differentiable", op="Greater"),
    ]
    pages = {
        "nested": explained(nested(), overrides=overrides, default_gradient_nodes=["y", "if/s"]),
        "layered": layered_explained(),
        "large": large_explained(20_000),
        "hostile": hostile(),
    }
    for name, explanation in pages.items():
        (folder / f"{name}.html").write_text(explanation.html(), encoding="utf-8")
        values = data(_picture.view(explanation, explanation.graph))
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
