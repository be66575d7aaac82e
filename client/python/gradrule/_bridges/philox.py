"""Draws the random numbers of TensorFlow's `stateless_uniform` and `stateless_normal` with `alg="philox"`.

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def key_and_counter(seed: Any) -> tuple[Any, Any]:
    """Returns the key, uint64 of shape (1,), and the counter, uint64 of shape (2,), that TensorFlow makes of a seed.

    seed: int64 of shape (2,).
    """
    first, second = np.asarray(seed, np.int64).view(np.uint64)
    start = np.array([[first & _LOW, first >> _HALF, second & _LOW, second >> _HALF]], np.uint64)
    mixed = _philox(start, (0x3EC8F720, 0x02461E29))[0]
    return np.array([mixed[0] | mixed[1] << _HALF]), np.array([np.uint64(0), mixed[2] | mixed[3] << _HALF])


def uniform(shape: tuple[int, ...], key: Any, counter: Any, dtype: np.dtype[Any]) -> Any:
    """Returns numbers from [0, 1) of float32 or float64."""
    count = math.prod(shape)
    if dtype == np.float64:
        return _doubles(_words(2 * count, key, counter)).reshape(shape)
    return _floats(_words(count, key, counter)).reshape(shape).astype(dtype)


def normal(shape: tuple[int, ...], key: Any, counter: Any, dtype: np.dtype[Any]) -> Any:
    """Returns numbers of the standard normal distribution of float32 or float64, by the Box-Muller transform."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    if dtype == np.float64:
        numbers = _doubles(_words(4 * pairs, key, counter)).reshape(-1, 2)
    else:
        numbers = _floats(_words(2 * pairs, key, counter)).reshape(-1, 2)
    real = numbers.dtype.type
    radius = np.sqrt(real(-2) * np.log(np.maximum(numbers[:, 0], real(1e-7))))
    angle = real(2 * math.pi) * numbers[:, 1]
    drawn = np.stack([np.sin(angle) * radius, np.cos(angle) * radius], axis=1)
    return drawn.ravel()[:count].reshape(shape).astype(dtype)


def _words(count: int, key: Any, counter: Any) -> Words:
    """Returns 32-bit words, four for each value of the counter."""
    blocks = (count + 3) // 4
    low = counter[0] + np.arange(blocks, dtype=np.uint64)
    high = np.where(low < counter[0], counter[1] + np.uint64(1), counter[1])
    words = np.stack([low & _LOW, low >> _HALF, high & _LOW, high >> _HALF], axis=1)
    return _philox(words, (int(key[0]) & 0xFFFFFFFF, int(key[0]) >> 32)).ravel()[:count]


def _philox(words: Words, key: tuple[int, int]) -> Words:
    first, second = key
    for _ in range(_ROUNDS):
        left, right = words[:, 0] * np.uint64(_MULTIPLIERS[0]), words[:, 2] * np.uint64(_MULTIPLIERS[1])
        words = np.stack(
            [
                right >> _HALF ^ words[:, 1] ^ np.uint64(first),
                right & _LOW,
                left >> _HALF ^ words[:, 3] ^ np.uint64(second),
                left & _LOW,
            ],
            axis=1,
        )
        first, second = first + _WEYL[0] & 0xFFFFFFFF, second + _WEYL[1] & 0xFFFFFFFF
    return words


def _floats(words: Words) -> Any:
    """Returns float32 from [0, 1), of the 23 lowest bits of each word."""
    bits = (words & np.uint64(0x7FFFFF) | np.uint64(127 << 23)).astype(np.uint32)
    return bits.view(np.float32) - np.float32(1)


def _doubles(words: Words) -> Any:
    """Returns float64 from [0, 1), of 20 bits of one word and 32 bits of the next."""
    pairs = words.reshape(-1, 2)
    bits = (pairs[:, 0] & np.uint64(0xFFFFF) | np.uint64(1023 << 20)) << _HALF | pairs[:, 1]
    return bits.view(np.float64) - 1.0
