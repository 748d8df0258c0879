"""Test that cheap cases of the benchmarks run and are reported."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.__main__ import main

FANOUT, PLANNER = "fanout.local.packed", "planner.1250.instances_of_4"


def test_main_cheap_cases(tmp_path: Path) -> None:
    assert main([f"{PLANNER},{FANOUT}", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    # The fan-out is a count, which no load changes.
    assert [(result["case"], result["goal"], result["met"]) for result in results] == [
        (FANOUT, "<= 1", True),
        (PLANNER, None, None),
    ]
    for result in results:
        assert result["ours"] > 0
        assert result["ratio_p10"] <= result["ratio"] <= result["ratio_p90"]
