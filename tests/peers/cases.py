"""What is compared, as it travels from the peers' process to gradrule's: cases in a JSON file, arrays in an .npz.

Neither PyTorch nor gradrule is imported here: both sides read this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = ("float32", "float64")
# A difference counts relative to the reference's element, but to no less than this part of its largest element.
FLOORS = {"float32": 1e-2, "float64": 1e-5}
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}


@dataclass(frozen=True)
class Case:
    """One comparison.

    rule, params: gradrule's. what: for people. run: how gradrule computes it, see `runs.py`. known_fault: why the peer
    is wrong here: the case must then differ. skip: elements of the reference that are left out, and why. explained: why
    gradrule differs on purpose: the case must then differ too.
    """

    id: str
    rule: str
    peer: str
    what: str
    dtype: str
    params: Mapping[str, Any]
    run: Mapping[str, Any]
    tolerance: float
    floor: float
    known_fault: str = ""
    skip: str = ""
    explained: str = ""


@dataclass
class Collection:
    """The cases of one run and their arrays, as the peers' process collects them."""

    versions: dict[str, str]
    networks: dict[str, Any] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)

    def add(
        self,
        rule: str,
        peer: str,
        what: str,
        dtype: str,
        run: Mapping[str, Any],
        inputs: Mapping[str, Array],
        references: Mapping[str, Array],
        params: Mapping[str, Any] | None = None,
        *,
        floor: float | None = None,
        tolerance: float | None = None,
        known_fault: str = "",
        skip: str = "",
        explained: str = "",
        skipped: Array | None = None,
    ) -> None:
        """Adds a case. inputs: by name, as `run` tells. references: the peer's gradients, by input."""
        number = f"{len(self.cases):04d}"
        self.cases.append(
            Case(
                number,
                rule,
                peer,
                what,
                dtype,
                dict(params or {}),
                run,
                TOLERANCES[dtype] if tolerance is None else tolerance,
                FLOORS[dtype] if floor is None else floor,
                known_fault,
                skip,
                explained,
            )
        )
        for name, value in inputs.items():
            self.arrays[f"{number}/in/{name}"] = np.asarray(value)
        for name, value in references.items():
            self.arrays[f"{number}/ref/{name}"] = np.asarray(value)
        if skipped is not None:
            self.arrays[f"{number}/skipped"] = skipped

    def save(self, folder: Path) -> None:
        """Writes reference.json and reference.npz."""
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "versions": self.versions,
            "networks": self.networks,
            "cases": [asdict(case) for case in self.cases],
        }
        (folder / "reference.json").write_text(json.dumps(manifest, indent=1) + "\n")
        np.savez(folder / "reference.npz", **self.arrays)


@dataclass(frozen=True)
class Reference:
    """What a `Collection` saved, read back."""

    versions: Mapping[str, str]
    networks: Mapping[str, Any]
    cases: Sequence[Case]
    arrays: Mapping[str, Array]

    @classmethod
    def load(cls, folder: Path) -> Reference:
        """Reads reference.json and reference.npz."""
        manifest = json.loads((folder / "reference.json").read_text())
        with np.load(folder / "reference.npz", allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        cases = [Case(**case) for case in manifest["cases"]]
        return cls(manifest["versions"], manifest["networks"], cases, arrays)

    def inputs(self, case: Case) -> dict[str, Array]:
        """The arrays that gradrule gets."""
        return self._under(f"{case.id}/in/")

    def references(self, case: Case) -> dict[str, Array]:
        """The peer's gradients, by input."""
        return self._under(f"{case.id}/ref/")

    def skipped(self, case: Case) -> Array | None:
        """Elements that are not compared."""
        return self.arrays.get(f"{case.id}/skipped")

    def weights(self, network: str, dtype: str) -> dict[str, Array]:
        """The weights of a network, in PyTorch's layout: (out, in) and (out, in, height, width)."""
        weights = self._under(f"{network}/weights/")
        return {name: value.astype(dtype) for name, value in weights.items()}

    def _under(self, prefix: str) -> dict[str, Array]:
        return {name.removeprefix(prefix): value for name, value in self.arrays.items() if name.startswith(prefix)}


def moments(x: Array, gradient: Array) -> Array:
    """Least and largest gradient where x > 0; mean, deviation, least and largest where x <= 0."""
    above, below = gradient[x > 0], gradient[x <= 0]
    return np.array([above.min(), above.max(), below.mean(), below.std(), below.min(), below.max()])
