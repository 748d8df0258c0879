"""Test the commands of `make demo`, a run on an embedded Ray."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.runs import ROOT, lines

FLAGS = "--steps 2 --prompts_per_step 4 --evaluation.every 1"


@pytest.mark.timeout(400)
def test_make_demo(tmp_path: Path) -> None:
    """The commands stand in the Makefile, and DEMO_ARGS adds flags."""
    pytest.importorskip("ray")
    _, _, rest = (ROOT / "Makefile").read_text().partition("\ndemo: ")
    recipe = [line for line in rest.partition("\n\n")[0].splitlines() if line.startswith("\t@")]
    assert len(recipe) == 2
    for line in recipe:
        command = line.removeprefix("\t@").replace("$(PY)", sys.executable)
        ran = subprocess.run(
            shlex.split(command.replace("$(DEMO_ARGS)", FLAGS)),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    out = tmp_path / "runs" / "demo"
    found = lines(out / "metrics.jsonl")
    assert [each["step"] for each in found] == [0, 1, 2]
    assert all("eval/greedy_accuracy" in each for each in found)
    assert {"summary.json", "curve.png", "model"} <= {each.name for each in out.iterdir()}
