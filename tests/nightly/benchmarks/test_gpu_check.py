"""Test that the checks for accelerators run on a CPU, in a rehearsal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import CHECKS  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("flags", "checks"),
    [
        (["2"], list(CHECKS)),
        (["1"], ["rollouts.speed", "weights.three_ways"]),
        (
            ["2", "--two-processes-one-device"],
            [
                "hangs.rank_missing",
                "training.same_losses_as_the_host",
                "weights.shared_device",
                "weights.three_ways",
                "memory.turns",
            ],
        ),
    ],
    ids=["two devices", "checks that differ on one device", "two processes on one device"],
)
def test_gpu_check_rehearsal(flags: list[str], checks: list[str], tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "benchmarks.gpu", *checks, "--out", str(table)]
    command += ["--rehearse", *flags]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=1100, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    results = [row.split(" | ")[1] for row in rows]
    assert len(rows) == len(checks)
    assert "failed" not in results
    not_run = [row for row in rows if row.split(" | ")[1] == "not run" and "| vllm." not in row]
    assert len(not_run) <= 2, rows
