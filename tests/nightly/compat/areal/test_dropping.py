"""Test a Ray scheduler of AReaL's spelling that is dropped without close()."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.areal.suite import check_dropped_scheduler


def test_dropped_scheduler_ends_workers(tmp_path: Path) -> None:
    import ray

    if ray.is_initialized():
        pytest.skip("another test uses its cluster")
    check_dropped_scheduler("ray", tmp_path)
