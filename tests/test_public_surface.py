"""Tests of the public names of `helmsman`. A change here changes the interface for users."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cloudpickle
import msgspec
import pytest

import helmsman
import helmsman.testing

ROOT = Path(__file__).parents[1]

PUBLIC = [
    "Batch",
    "BoundedStaleness",
    "Checkpoints",
    "Cluster",
    "ClusterConfig",
    "Dispatch",
    "Execute",
    "GenerateScheduler",
    "GenerationRequest",
    "GenerationResult",
    "GroupWorker",
    "HelmsmanError",
    "InferenceEngine",
    "InlineScheduler",
    "Job",
    "LocalScheduler",
    "RayScheduler",
    "RecoverableTraining",
    "RecoveryPolicy",
    "RequestOptions",
    "ResourceManager",
    "ResultHandle",
    "RetryGeneration",
    "RewardPool",
    "RolloutController",
    "SamplingParams",
    "Scheduler",
    "SchedulingSpec",
    "SchedulingStrategy",
    "SupervisionPolicy",
    "Timeouts",
    "TrainController",
    "TrainEngine",
    "DeviceHandoff",
    "WeightSync",
    "Worker",
    "WorkerOutput",
    "WorkflowExecutor",
    "current_platform",
    "get_placement_group_master_ip_and_port",
    "initialize",
    "make_scheduler",
    "register",
]
TESTING = [
    "GENERATED",
    "EngineModel",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRecord",
    "Hang",
    "Kill",
    "Lengths",
    "SimulatedBackend",
    "SimulatedInstance",
    "VirtualLoop",
    "log_normal_lengths",
    "run_virtually",
]


def test_all_names() -> None:
    assert sorted(helmsman.__all__) == sorted(PUBLIC)


MODULES = {
    "errors": ["CallTimeoutError", "HelmsmanError", "WorkerFailedError"],
    "policies": ["LeastOutstandingTokens", "RetryGeneration", "SupervisionPolicy"],
    "recipes": ["DPO", "GRPO", "PPO", "SFT"],
    "testing": ["FaultPlan", "SimulatedBackend"],
    "weights": ["ViaCollective", "ViaDisk", "ViaMemory", "WeightFormat", "WeightSync"],
    "worker_groups": ["Cluster", "Collect", "Replicate", "Shard", "register"],
}


def test_public_modules_resolve_lazily() -> None:
    code = f"""
import sys, helmsman
modules = {MODULES!r}
assert not {{f"helmsman.{{name}}" for name in modules}} & set(sys.modules)
assert set(modules) <= set(dir(helmsman))
for name, names in modules.items():
    for each in names:
        getattr(getattr(helmsman, name), each)
assert not {{"ray", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


TWO_FORMS = [
    "Cluster",
    "DeviceHandoff",
    "RewardPool",
    "RolloutController",
    "Scheduler",
    "TrainController",
    "WeightSync",
]


@pytest.mark.parametrize("owner", TWO_FORMS)
def test_async_form_has_signature_of_blocking_form(owner: str) -> None:
    cls = getattr(helmsman, owner)
    pairs = [name.removeprefix("async_") for name in dir(cls) if name.startswith("async_")]
    assert pairs
    for name in pairs:
        blocks, awaits = getattr(cls, name), getattr(cls, f"async_{name}")
        ours, theirs = inspect.signature(blocks), inspect.signature(awaits)
        assert ours.parameters == theirs.parameters, name
        if name != "stream":  # returns an iterator, and an asynchronous one
            assert inspect.iscoroutinefunction(inspect.unwrap(awaits)) or hasattr(
                awaits, "__wrapped__"
            )
            assert not inspect.iscoroutinefunction(blocks), name


@pytest.mark.parametrize("owner", TWO_FORMS)
def test_no_other_name_for_an_async_form(owner: str) -> None:
    """A public coroutine is the ``async_`` form of a blocking method, or one of the kept names."""
    cls = getattr(helmsman, owner)
    kept = {"create_engine", "set_worker_env", "check_health", "inject", "kill_worker"}
    kept |= {"preemption_notices", "probe_rendezvous", "explain"}
    for name, _ in inspect.getmembers(cls, inspect.iscoroutinefunction):
        if not name.startswith("_") and name not in kept:
            assert name.startswith("async_") and hasattr(cls, name.removeprefix("async_")), name


def test_testing_all_names() -> None:
    assert sorted(helmsman.testing.__all__) == sorted(TESTING)


def test_testing_names_resolve() -> None:
    assert all(getattr(helmsman.testing, name) is not None for name in TESTING)


def test_dir_lists_public_names() -> None:
    assert set(PUBLIC) <= set(dir(helmsman))


def test_public_names_have_docstrings() -> None:
    for name in PUBLIC:
        value = getattr(helmsman, name)
        assert value is getattr(helmsman, name)
        assert value.__doc__ or not callable(value), name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = helmsman.no_such_name


def test_star_import() -> None:
    code = "from helmsman import *; import helmsman; assert set(helmsman.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_written_once() -> None:
    """pyproject.toml reads the version from the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "helmsman.api.version.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", helmsman.__version__)


@pytest.mark.parametrize("arguments", [["--version"], ["doctor", "--json"]])
def test_command_line_without_installation(arguments: list[str], tmp_path: Path) -> None:
    """PYTHONPATH leads to the sources, and there is no metadata of an installed package."""
    for package in (msgspec, cloudpickle):
        folder = Path(package.__file__).parent  # type: ignore[arg-type]
        (tmp_path / folder.name).symlink_to(folder)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "helmsman", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert "PackageNotFoundError" not in done.stderr
    assert done.stderr == ""
    assert helmsman.__version__ in done.stdout
