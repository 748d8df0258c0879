"""Tests of ``helmsman up`` with a real Ray that fails, has little memory or stops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman._cluster.settings import MANY_NODES, cluster_defaults
from tests.cluster.hosts import why_not_here
from tests.cluster.up_command import PROGRAMS, Up, up

__all__ = ["up"]


NUM_WORKERS = 100 if "HELMSMAN_SOAK_ROUNDS" in os.environ else 6


def test_up_shows_why_ray_does_not_start(up: Up, tmp_path: Path) -> None:
    """Only the log of Ray's head contains the reason; a failed run keeps its logs."""
    run = up(
        "--start-timeout",
        "50",
        "--env",
        "RAY_gcs_storage=nonsense",
        "--",
        "true",
        TMPDIR=str(tmp_path),
    )
    run.ends(93, "Unsupported GCS storage type: nonsense", "of at most 50 s", limit_s=100.0)
    assert run.output.count("Ray did not start on this node: gcs_server has ended") == 2
    assert run.output.count("Ray is started once more (after ") == 1


def in_control_group(folder: Path, limit: int, used: int) -> list[str]:
    """Return a command that runs a program in a container with this memory."""
    folder.mkdir()
    for name, text in (
        ("max", limit),
        ("current", used),
        ("stat", "inactive_file 0\nactive_file 0"),
    ):
        (folder / f"memory.{name}").write_text(f"{text}\n")
    mount = f"mount --bind {folder} /sys/fs/cgroup && exec " + '"$@"'
    return ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", mount, "sh"]


@pytest.mark.root
@pytest.mark.skipif(bool(why_not_here()), reason="no mounts can be made here")
def test_up_follows_the_memory_of_a_container(up: Up, tmp_path: Path) -> None:
    """Ray itself would start some processes, and then print a traceback."""
    below = in_control_group(tmp_path / "little", 1 << 30, 800 << 20)
    facts = (
        "Ray cannot start on this node",
        "224.0 MiB of memory are available, expected 530.0 MiB",
        "helmsman doctor",
    )
    up("--", "true", below=below).ends(90, *facts)
    up("--object-store", "0.2", "--", "true", below=below).ends(90, "--object-store 0.2 GiB")
    # 30 % of all memory, 1.2 GiB, would leave Ray nothing.
    run = up("--", "true", below=in_control_group(tmp_path / "more", 4 << 30, 3 << 30))
    run.ends(0, "object store 307.2 MiB", limit_s=100.0)


@pytest.mark.timeout(600)
def test_up_survives_a_stopped_head_among_starts(up: Up) -> None:
    """A stopped head stands for one that is overloaded by registrations. With the settings of few
    nodes, 15 s would end the run.
    """
    settings = [f"--env={each.name}={each.value}" for each in cluster_defaults(MANY_NODES)]
    run = up(*settings, *PROGRAMS, "burst", str(NUM_WORKERS), "15")
    run.ends(0, f"True that workers were starting, and then {NUM_WORKERS} are up\n", limit_s=500.0)
