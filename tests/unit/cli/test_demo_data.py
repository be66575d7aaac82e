from __future__ import annotations

import numpy as np

from gradrule.cli.demo import data


def test_the_digits_are_part_of_the_client() -> None:
    digits = data.load(seed=0)
    x = np.concatenate([digits.train_x, digits.test_x])
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert x.shape == (1797, data.PIXELS)
    assert x.dtype == np.float32
    assert (x.min(), x.max()) == (-1.0, 1.0)
    # The sizes of the classes are published with the data set.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # A zero is bright around its middle.
    zero = x[labels == 0].mean(axis=0).reshape(data.SIDE, data.SIDE)
    assert zero[4, 4] < zero[4, 2]


def test_the_seed_selects_the_test_digits() -> None:
    first, again, other = data.load(1), data.load(1), data.load(2)
    np.testing.assert_array_equal(first.test_x, again.test_x)
    assert not np.array_equal(first.test_x, other.test_x)
