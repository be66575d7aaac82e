"""Tests that regions of a memory are reserved, released and trimmed."""

from __future__ import annotations

import gc
import os

import numpy as np

from gradrule.common.memory_regions import PAGE, Memory, rounded_to_pages

_SIZE = 64 * PAGE


def held(memory: Memory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def test_regions_do_not_overlap_and_are_reused() -> None:
    memory = Memory(_SIZE)
    regions = [memory.reserve(PAGE + 1) for _ in range(32)]
    assert sorted(region.offset for region in regions if region) == list(range(0, _SIZE, 2 * PAGE))
    assert memory.reserve(1) is None
    middle = regions[7]
    assert middle is not None
    offset = middle.offset
    del middle
    regions[7] = regions[8] = None
    gc.collect()
    again = memory.reserve(4 * PAGE)
    assert again is not None and again.offset == offset
    regions.clear()
    del again
    gc.collect()
    whole = memory.reserve(_SIZE)
    assert whole is not None and whole.offset == 0


def test_arrays_and_their_views_keep_the_region_reserved() -> None:
    memory = Memory(_SIZE)
    region = memory.reserve(2 * PAGE)
    assert region is not None
    region.write(0, np.arange(PAGE // 4, dtype=np.float32).data.cast("B"))
    array = region.array(region.offset, np.dtype(np.float32), (PAGE // 4,))
    view = array.reshape(2, -1)[1:]
    del array, region
    gc.collect()
    assert memory.reserve(_SIZE) is None
    np.testing.assert_array_equal(view[0], np.arange(PAGE // 8, PAGE // 4))
    del view
    gc.collect()
    assert memory.reserve(_SIZE) is not None


def test_memory_is_reserved_at_use_and_trimmed_after_the_last_region() -> None:
    memory = Memory(_SIZE)
    assert held(memory) == 0
    first, second = memory.reserve(PAGE), memory.reserve(10 * PAGE)
    assert held(memory) == 11 * PAGE
    del second
    gc.collect()
    memory.trim()
    assert held(memory) == PAGE
    del first
    gc.collect()
    memory.trim()
    assert held(memory) == 0
    assert not memory.is_backed
    third = memory.reserve(3)
    assert third is not None and held(memory) == rounded_to_pages(3)
