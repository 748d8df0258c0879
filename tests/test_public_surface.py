"""What `import helmsman` offers. A change here is a change for users: make it on purpose."""

from __future__ import annotations

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

ROOT = Path(__file__).parent.parent

PUBLIC = [
    "AxisSharding",
    "Batch",
    "BoundedStaleness",
    "Checkpoints",
    "Cluster",
    "ClusterConfig",
    "Collect",
    "Dispatch",
    "EngineSpec",
    "Execute",
    "GenerateScheduler",
    "GenerationRequest",
    "GenerationResult",
    "GroupWorker",
    "HelmsmanError",
    "InferenceEngine",
    "InlineScheduler",
    "Job",
    "PreemptionNotice",
    "LeastOutstandingTokens",
    "LocalScheduler",
    "PrefixAffinity",
    "Ragged",
    "RankInfo",
    "RayScheduler",
    "RecoverableTraining",
    "RecoveryPolicy",
    "Replicate",
    "RequestOptions",
    "ResourceManager",
    "ResultHandle",
    "RetryGeneration",
    "RetryUnbegun",
    "RewardPool",
    "RolloutController",
    "RoundRobin",
    "SamplingParams",
    "Scheduler",
    "SchedulingSpec",
    "SchedulingStrategy",
    "SessionAffinity",
    "Shard",
    "SupervisionPolicy",
    "Timeouts",
    "TrainController",
    "TrainEngine",
    "Turns",
    "ViaCollective",
    "ViaDisk",
    "ViaMemory",
    "WeightFormat",
    "WeightSync",
    "Worker",
    "WorkflowExecutor",
    "current_platform",
    "get_placement_group_master_ip_and_port",
    "initialize",
    "make_scheduler",
    "register",
]
TESTING = [
    "GENERATED",
    "DropNode",
    "EngineModel",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRecord",
    "Hang",
    "Injection",
    "Kill",
    "Lengths",
    "SimulatedBackend",
    "SimulatedInstance",
    "Slow",
    "VirtualLoop",
    "log_normal_lengths",
    "run_virtually",
]


def test_all_names() -> None:
    assert sorted(helmsman.__all__) == sorted(PUBLIC)


def test_testing_all_names() -> None:
    assert sorted(helmsman.testing.__all__) == sorted(TESTING)


@pytest.mark.parametrize("name", TESTING)
def test_testing_name_resolves(name: str) -> None:
    assert getattr(helmsman.testing, name) is not None


def test_dir_lists_public_names() -> None:
    assert set(PUBLIC) <= set(dir(helmsman))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_docstring(name: str) -> None:
    value = getattr(helmsman, name)
    assert value is getattr(helmsman, name)
    if callable(value):
        assert value.__doc__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = helmsman.no_such_name


def test_star_import() -> None:
    code = "from helmsman import *; import helmsman; assert set(helmsman.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_written_once() -> None:
    """pyproject.toml reads the version from the package, so an installed and a copied Helmsman
    agree.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "helmsman.api.version.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", helmsman.__version__)


@pytest.mark.parametrize("arguments", [["--version"], ["doctor", "--json"]])
def test_command_line_without_installation(arguments: list[str], tmp_path: Path) -> None:
    """Only PYTHONPATH leads to the sources, and no metadata of an installed package is there."""
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
