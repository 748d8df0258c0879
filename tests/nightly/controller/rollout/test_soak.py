"""Long soak test of a rollout on processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman.controller._rollout.request import RequestState
from tests.controller.rollout.soak import run_and_check

NUM_REQUESTS = 20_000 if "HELMSMAN_SOAK_ROUNDS" in os.environ else 6_000


@pytest.mark.timeout(400)
def test_soak_each_request_has_one_end(tmp_path: Path) -> None:
    seed = int(os.environ.get("HELMSMAN_SOAK_SEED", "1"))
    soak = run_and_check(tmp_path, seed, NUM_REQUESTS)
    assert soak.ends[RequestState.DONE] > 0.9 * NUM_REQUESTS
    assert set(soak.ends) == {
        RequestState.DONE,
        RequestState.PARTIAL,
        RequestState.ABORTED,
        RequestState.FAILED,
    }
    (bytes_half, objects_half), (bytes_end, objects_end) = soak.sizes[1], soak.sizes[3]
    assert bytes_end < 1.2 * bytes_half
    assert objects_end < 1.2 * objects_half
