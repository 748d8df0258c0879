"""Reports about ranks that disagree, and about receivers that stop in a broadcast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.helpers import ROOT
from tests.controller.sync_world import World
from tests.engines.ranks import free_port
from tests.field.test_weights import check_receiver_stops

RANK = """
import sys
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.small_models import LLAMA, random_tokens

engine = FSDPTrainEngine(model=LLAMA, lr=1e-2, rendezvous_timeout_s=60)
engine.initialize()
samples = [{"input_ids": random_tokens(12, seed=seed)} for seed in range(4)]
for _ in range(2):
    stats = engine.train_batch(samples, "sft", None)
engine.save(sys.argv[1])
engine.load(sys.argv[1])
print("hash", hash("weight"), "loss", engine.eval_batch(samples, "sft", None)["loss"])
"""


def test_ranks_with_different_hash_seeds(tmp_path: Path) -> None:
    """RLinf #1355, verl #6405: an all-gather hangs, since ranks iterate a set of names."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "HELMSMAN_PLATFORM": "cpu",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "saved")],
            env={
                **environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONHASHSEED": str(rank + 1),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [each.communicate(timeout=200)[0].split() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0]
    (_, first_hash, _, first_loss), (_, second_hash, _, second_loss) = printed
    assert first_hash != second_hash
    assert first_loss == second_loss


@pytest.mark.parametrize("place", [0, 1, 5, 8])
def test_receiver_stops_in_each_broadcast(place: int, world: World) -> None:
    """TRL #6797 and #7103: a sync hangs without a message, as one receiver does not answer."""
    check_receiver_stops(world, place)
