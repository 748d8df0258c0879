"""Tests of the output folder of a run on a full disk, for which a limit of file sizes stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import resource, sys
from pathlib import Path
from helmsman.recipes.files import append_line, read_lines, write_json

folder = Path(sys.argv[1])
path = folder / "metrics.jsonl"
append_line(path, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
for write in (lambda: append_line(path, {"step": 2}), lambda: append_line(path, {"step": "x" * 30}),
              lambda: write_json(folder / "draws.json", {"step": "x" * 30})):
    try:
        write()
    except OSError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
append_line(path, {"step": 3})
print([line["step"] for line in read_lines(path, dict)])
"""


def test_no_half_of_a_line_is_left_on_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *failures, steps = done.stdout.splitlines()
    assert steps == "[1, 3]"
    assert failures[:2] == [f"[Errno 28] No space left on device: '{tmp_path}/metrics.jsonl'"] * 2
    assert failures[2:] == [f"[Errno 27] File too large: '{tmp_path}/draws.json'"]
