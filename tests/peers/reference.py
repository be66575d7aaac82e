"""The peers' half of `make test-peers`: computes reference values, with the peers' Python.

python -m tests.peers.reference FOLDER reads the models that `tests.peers.keras_models` wrote there, and writes
reference.json and reference.npz, which `tests.peers.compare` reads.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from tests.peers.attribution import add_attribution
from tests.peers.cases import Collection
from tests.peers.elementwise import add_elementwise, add_others
from tests.peers.libraries import VERSIONS, torch
from tests.peers.subgraphs import add_subgraphs
from tests.peers.torch_models import add_models


def main() -> None:
    folder = Path(sys.argv[1])
    # What captum and zennit warn of (hooks that they set and remove) is theirs.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    collection = Collection(dict(VERSIONS))
    add_elementwise(collection)
    add_others(collection)
    add_subgraphs(collection)
    add_attribution(collection)
    add_models(collection, folder / "models")
    collection.save(folder)
    print(f"{len(collection.cases)} reference values from {', '.join(f'{k} {v}' for k, v in VERSIONS.items())}")


if __name__ == "__main__":
    main()
