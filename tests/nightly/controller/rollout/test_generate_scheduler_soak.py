"""Long soak test of GenerateScheduler."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest

from tests.unit.controller.rollout.soak import check_soak, run_soak

NUM_REQUESTS = 20_000 if "HELMSMAN_SOAK_ROUNDS" in os.environ else 6_000


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("young_heap")
def test_soak_memory_flat() -> None:
    sizes: list[int] = []

    def measure() -> None:
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        soak = run_soak(100, NUM_REQUESTS, measure)
    finally:
        tracemalloc.stop()
    check_soak(soak)
    print("bytes at each quarter", sizes)
    assert len(sizes) == 4
    assert max(sizes[1:]) - sizes[0] < 1_000_000
    kinds = ("kill", "hang", "abort_some", "suspend", "leave", "update")
    assert min(soak.happened[kind] for kind in kinds) > 10
    assert soak.backend.num_late > 10
