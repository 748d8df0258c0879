"""Test recordings of runs on local workers: asynchronous, killed, and with shared devices."""

from __future__ import annotations

import shlex

import pytest

from helmsman.recipes.recorded import find_parts, read_part
from tests.recipes.processes import finish
from tests.recipes.runs import Runs
from tests.recipes.test_recorded_runs import replay, trained

pytestmark = pytest.mark.timeout(400)


def test_recording_asynchronous_workers_killed(runs: Runs) -> None:
    """Steps that were repeated after a recovery have the rollouts that were trained on last."""
    flags = shlex.split("--rollout.staleness 1 --steps 6 --checkpoints.every 2")
    process = runs.start("source", *flags, "--rollout.record", "true")
    source = runs.folder / "source"
    finish(process, source, [("train", 3), ("rollout", 4)])
    parts = find_parts(source)
    assert [*parts] == [1, 2, 3, 4, 5, 6]
    assert not [path.name for path in (source / "rollouts").iterdir() if path.name[0] == "."]
    finish(runs.start("again", *flags, *replay(source)), runs.folder / "again")
    for ours, theirs in zip(trained(runs, "again"), trained(runs, "source"), strict=True):
        assert ours["loss"] == theirs["loss"], ours["step"]
        assert ours["grad_norm"] == theirs["grad_norm"], ours["step"]
    draws = [{row["draw"] for row in read_part(path, ["draw"])[1]} for path in parts.values()]
    assert len(set.union(*draws)) == sum(map(len, draws)), "no draw is trained on twice"


def test_recording_of_shared_devices(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer keeps the devices, and the reference takes its turns."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    flags = shlex.split(
        "--steps 2 --cluster.placement colocated --cluster.devices_per_node 1 "
        "--cluster.env_vars.HELMSMAN_PLATFORM cpu --algorithm.kl_coef 0.1"
    )
    process = runs.start("source", *flags, "--rollout.record", "true")
    finish(process, runs.folder / "source")
    printed, _ = finish(
        runs.start("again", *flags, *replay(runs.folder / "source")), runs.folder / "again"
    )
    assert "rollout (beside train)" not in printed
    assert trained(runs, "again") == trained(runs, "source")
