"""What `import helmsman` offers. A change here is a change for users: make it on purpose."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import helmsman

PUBLIC = [
    "AxisSharding",
    "Batch",
    "BoundedStaleness",
    "Checkpoints",
    "Cluster",
    "ClusterConfig",
    "Collect",
    "Dispatch",
    "Drill",
    "DropNode",
    "EngineSpec",
    "Execute",
    "FaultPlan",
    "FaultRecord",
    "GenerateScheduler",
    "GenerationRequest",
    "GenerationResult",
    "GroupWorker",
    "Hang",
    "HelmsmanError",
    "InferenceEngine",
    "InlineScheduler",
    "Job",
    "Kill",
    "Leaving",
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
    "Slow",
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


def test_public_names_are_these() -> None:
    assert sorted(helmsman.__all__) == sorted(PUBLIC)


def test_dir_lists_every_public_name() -> None:
    assert set(PUBLIC) <= set(dir(helmsman))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves_and_has_a_docstring(name: str) -> None:
    value = getattr(helmsman, name)
    assert value is getattr(helmsman, name)
    if callable(value):
        assert value.__doc__


def test_type_checkers_see_each_name_where_it_is_loaded_from() -> None:
    tree = ast.parse(Path(helmsman.__file__).read_text())
    seen = {
        alias.asname: (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: (home, name) for name, home in helmsman._HOMES.items()}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = helmsman.no_such_name


def test_star_import_works_in_a_fresh_interpreter() -> None:
    code = "from helmsman import *; import helmsman; assert set(helmsman.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
