"""Reports about file systems that fail or are late."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from helmsman import Checkpoints
from tests.field.faulty import build, needs_compiler, run_faulty

pytestmark = needs_compiler

SAVES = """
import sys
from pathlib import Path
from helmsman import Checkpoints
from helmsman.recipes.files import append_line

out = Path(sys.argv[1])
checkpoints = Checkpoints(out / "checkpoints", 1)


def write(folder):
    folder.mkdir()
    (folder / "weights").write_text("weights")


for step in range(1, 4):
    checkpoints.save(step, write)
    append_line(out / "metrics.jsonl", {"step": step})
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("library"))


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())


def test_old_checkpoint_cannot_be_removed(library: Path, tmp_path: Path) -> None:
    """prime-rl #2142: a run dies in the clean-up of a network file system.

    The file system keeps a file of an old checkpoint, as NFS does while a process has it open.
    """
    done = run_faulty(library, f"unlink:{errno.EBUSY}:.step-000001.old", "-c", SAVES, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [".step-000001.old", "latest", "step-000003"]
    Checkpoints(tmp_path / "checkpoints", 1).save(4, lambda folder: folder.mkdir())
    assert steps_of(tmp_path) == ["latest", "step-000004"]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (f"mkdir:{errno.EIO}:step-000002", "checkpoints/.step-000002"),
        (f"rename:{errno.ESTALE}:step-000002", "checkpoints/step-000002"),
        (f"write:{errno.EIO}:metrics.jsonl", "metrics.jsonl"),
        (f"write:{errno.ENOSPC}:metrics.jsonl", "metrics.jsonl"),
    ],
    ids=lambda each: each.partition(":")[0],
)
def test_failed_write_names_its_file(fault: str, name: str, library: Path, tmp_path: Path) -> None:
    """prime-rl #2699, NeMo-RL #3504: a run ends in mkdir or a save, and the file is unknown."""
    done = run_faulty(library, fault, "-c", SAVES, str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/{name}'" in done.stderr.strip().splitlines()[-1]
    done = run_faulty(library, "", "-c", SAVES, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == ["latest", "step-000003"]
