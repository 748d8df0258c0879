"""The checks for accelerators run, as far as a CPU lets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import CHECKS, main  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_devices", "checks"),
    [("2", list(CHECKS)), ("1", ["rollouts.speed", "weights.three_ways"])],
    ids=["two devices", "checks that differ on one device"],
)
def test_gpu_check_rehearsal(num_devices: str, checks: list[str], tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--rehearse",
        num_devices,
        "--out",
        str(table),
        *checks,
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=1100, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    results = [row.split(" | ")[1] for row in rows]
    assert len(rows) == len(checks)
    assert "failed" not in results
    assert results.count("not run") <= 2, rows


def test_gpu_check_without_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if main(["devices.binding", "--out", str(tmp_path / "gpu.md")]) == 0:
        pytest.skip("this machine has accelerators")
    said = capsys.readouterr().err
    assert "this machine has no accelerator that Helmsman sees" in said
    assert "--rehearse" in said


def test_gpu_check_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    text = capsys.readouterr().err
    assert "there is no check nonsense; there are " in text
    assert all(name in text for name in CHECKS)


def test_gpu_check_names_documented() -> None:
    documented = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in CHECKS if f"| `{name}` |" not in documented] == []
