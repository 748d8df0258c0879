"""Tests that need the installed Ray and no cluster: names that Helmsman uses, and a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helmsman._cli import main
from helmsman._cluster.node_plan import ray_start
from helmsman._cluster.settings import MANY_NODES, cluster_defaults
from helmsman._process.ports import PortLeases
from helmsman.api.platforms import PLATFORMS
from tests.cluster.nodes import make_plan


def test_flags_of_ray_start(tmp_path: Path) -> None:
    from ray.scripts.scripts import start

    known = {
        name for parameter in start.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    plan = make_plan(
        tmp_path, count=2, resources={"CPU": 1.0, "GPU": 1.0, "memory": 2.0**36, "x": 1.0}
    )
    leases = PortLeases()
    try:
        for head in ("", "10.0.0.1:6379"):
            arguments = ray_start(plan, "run-1", leases, head)[len(plan.ray_command) :]
            flags = {each.partition("=")[0] for each in arguments if each.startswith("--")}
            assert flags <= known
            start.make_context("start", arguments)  # parses all values
    finally:
        leases.close()


def test_variables_of_cluster_defaults() -> None:
    """Ray ignores unknown variables."""
    import ray

    home = Path(ray.__file__).parent
    names = {
        each.name.removeprefix("RAY_").encode()
        for each in (*cluster_defaults(1), *cluster_defaults(MANY_NODES))
    }
    binaries = [home / "_raylet.so", home / "core" / "src" / "ray" / "raylet" / "raylet"]
    scripts = (path for folder in ("_private", "_common") for path in (home / folder).rglob("*.py"))
    for path in (*binaries, *scripts):
        content = path.read_bytes()
        names = {name for name in names if name not in content}
    assert not names


def test_resources_and_masks_of_platforms() -> None:
    from ray._private.accelerators import (
        AMDGPUAcceleratorManager,
        get_accelerator_manager_for_resource,
    )

    for info in PLATFORMS.values():
        if info.visibility_env_var:
            manager: Any = get_accelerator_manager_for_resource(info.ray_resource)
            if info.name == "rocm":
                manager = AMDGPUAcceleratorManager
            assert manager is not None
            assert manager.get_resource_name() == info.ray_resource
            assert manager.get_visible_accelerator_ids_env_var() == info.visibility_env_var


def test_plan_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text("- {role: r}")
    assert main(["plan", str(jobs), "--address", "127.0.0.1:9"]) == 2
    output = capsys.readouterr()
    assert "there is no Ray cluster at '127.0.0.1:9': nothing answers there" in output.err
    assert output.out == ""
