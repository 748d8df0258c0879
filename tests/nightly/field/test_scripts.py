"""Reports about scripts that run beside other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.contract.helpers import ROOT

MAPS = """
import datasets
from helmsman import Job, LocalScheduler
from tests.contract.engines import Counter

with LocalScheduler(preload=()) as scheduler:
    scheduler.create_workers(Job(role="actor"))
    scheduler.create_engines(["actor/0"], Counter)
    rows = datasets.Dataset.from_dict({"number": list(range(64))})
    mapped = rows.map(lambda row: {"number": row["number"] + 1}, num_proc=8)
    assert mapped["number"][:] == list(range(1, 65))
    assert scheduler.call_engine("actor/0", "add") == 1
    print("mapped")
"""


def test_datasets_map_beside_a_scheduler(tmp_path: Path) -> None:
    """SkyRL #1415: datasets.map hangs in its forked processes, after the cluster has started."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", MAPS], capture_output=True, text=True, env=environ, timeout=120
    )
    assert "mapped" in done.stdout, done.stderr
