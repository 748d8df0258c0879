"""Reports about file systems that fail while a model is trained."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from helmsman.recipes import make_model
from tests.field.faulty import build, needs_compiler, run_faulty
from tests.unit.recipes.data import write_jsonl

pytestmark = [needs_compiler, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "fault",
    [
        f"mkdir:{errno.EIO}:step-000002",
        f"write:{errno.ENOSPC}:step-000002",
        f"rename:{errno.ESTALE}:step-000002",
        f"write:{errno.EIO}:metrics.jsonl",
    ],
)
def test_training_after_a_fault(fault: str, tmp_path: Path) -> None:
    """prime-rl #2699, NeMo-RL #3504: a run ends in a save, or hangs, and the file is unknown.

    The message names the file, and the run can be resumed.
    """
    model = make_model(tmp_path / "model", num_layers=1, width=32)
    data = write_jsonl(tmp_path / "rows.jsonl")
    flags = [
        *("-m", "helmsman", "sft", "--model", str(model), "--data.train", str(data)),
        *("--out", str(tmp_path / "out"), "--steps", "3", "--batch_size", "4"),
        *("--cluster.scheduler", "inline", "--checkpoints.every", "1", "--evaluate_every", "0"),
    ]
    library = build(tmp_path)
    done = run_faulty(library, fault, *flags)
    assert done.returncode == 1
    assert fault.rpartition(":")[2] in done.stderr.rpartition("Error")[2], done.stderr
    done = run_faulty(library, "", *flags, "--resume")
    assert done.returncode == 0, done.stderr
