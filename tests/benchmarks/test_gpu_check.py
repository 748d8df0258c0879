"""The checks for accelerators run, as far as a CPU lets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import CHECKS  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[2]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=ROOT, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_devices", "checks"),
    [("2", list(CHECKS)), ("1", ["rollouts.speed", "weights.three_ways"])],
    ids=["two devices", "checks that differ on one device"],
)
def test_a_rehearsal(num_devices: str, checks: list[str], tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    ran = gpu_check("--rehearse", num_devices, "--out", str(table), *checks)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    results = [row.split(" | ")[1] for row in rows]
    assert len(rows) == len(checks)
    assert "failed" not in results
    assert results.count("not run") <= 2, rows


def test_a_machine_without_accelerators() -> None:
    ran = gpu_check()
    if ran.returncode == 0:
        pytest.skip("this machine has accelerators")
    assert ran.returncode == 2
    assert "this machine has no accelerator that Helmsman sees" in ran.stderr
    assert "--rehearse" in ran.stderr


def test_a_check_that_does_not_exist() -> None:
    ran = gpu_check("nonsense")
    assert ran.returncode == 2
    assert "there is no check nonsense; there are devices.binding" in ran.stderr


def test_every_check_is_told_of() -> None:
    told = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in CHECKS if f"| `{name}` |" not in told] == []
