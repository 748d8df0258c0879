"""Test that the checks of vLLM for accelerators run on a CPU, in a rehearsal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_gpu_check_vllm_rehearsal(tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "1", "--out", str(table)]
    ended = subprocess.run(
        [*command, "vllm"], capture_output=True, text=True, timeout=850, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line for line in table.read_text().splitlines() if line.startswith("| vllm.")]
    assert len(rows) == 6
    assert {row.split(" | ")[1] for row in rows} == {"ok"}, rows
