"""Helmsman: the single-controller scheduler for LLM post-training.

Importing the package loads neither torch nor ray; public names are imported on first use.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from helmsman.api.version import __version__ as __version__

if TYPE_CHECKING:
    from helmsman._cluster.initialize import initialize as initialize
    from helmsman.api.batch import Batch as Batch
    from helmsman.api.dispatch import Dispatch as Dispatch
    from helmsman.api.dispatch import Execute as Execute
    from helmsman.api.engines import InferenceEngine as InferenceEngine
    from helmsman.api.engines import TrainEngine as TrainEngine
    from helmsman.api.errors import HelmsmanError as HelmsmanError
    from helmsman.api.generation import GenerationRequest as GenerationRequest
    from helmsman.api.generation import GenerationResult as GenerationResult
    from helmsman.api.generation import SamplingParams as SamplingParams
    from helmsman.api.platforms import current_platform as current_platform
    from helmsman.api.register import register as register
    from helmsman.api.scheduler import Job as Job
    from helmsman.api.scheduler import ResultHandle as ResultHandle
    from helmsman.api.scheduler import Scheduler as Scheduler
    from helmsman.api.scheduler import SchedulingSpec as SchedulingSpec
    from helmsman.api.scheduler import SchedulingStrategy as SchedulingStrategy
    from helmsman.api.scheduler import Timeouts as Timeouts
    from helmsman.api.scheduler import Worker as Worker
    from helmsman.api.worker_group import ClusterConfig as ClusterConfig
    from helmsman.api.worker_group import GroupWorker as GroupWorker
    from helmsman.controller._groups.cluster import Cluster as Cluster
    from helmsman.controller._groups.resource_manager import (
        ResourceManager as ResourceManager,
    )
    from helmsman.controller._rollout.executor import WorkflowExecutor as WorkflowExecutor
    from helmsman.controller._rollout.generate_scheduler import (
        GenerateScheduler as GenerateScheduler,
    )
    from helmsman.controller._rollout.health import SupervisionPolicy as SupervisionPolicy
    from helmsman.controller._rollout.request import RequestOptions as RequestOptions
    from helmsman.controller._rollout.retries import RetryGeneration as RetryGeneration
    from helmsman.controller._rollout.reward_pool import RewardPool as RewardPool
    from helmsman.controller._rollout.rollout_controller import (
        RolloutController as RolloutController,
    )
    from helmsman.controller._rollout.staleness import BoundedStaleness as BoundedStaleness
    from helmsman.controller._scheduler.factory import make_scheduler as make_scheduler
    from helmsman.controller._scheduler.inline import InlineScheduler as InlineScheduler
    from helmsman.controller._scheduler.local import LocalScheduler as LocalScheduler
    from helmsman.controller._scheduler.ray.scheduler import RayScheduler as RayScheduler
    from helmsman.controller._scheduler.ray.scheduler import (
        get_placement_group_master_ip_and_port as get_placement_group_master_ip_and_port,
    )
    from helmsman.controller._scheduler.worker_output import WorkerOutput as WorkerOutput
    from helmsman.controller._training.checkpoints import Checkpoints as Checkpoints
    from helmsman.controller._training.handoff import DeviceHandoff as DeviceHandoff
    from helmsman.controller._training.recovery import RecoverableTraining as RecoverableTraining
    from helmsman.controller._training.recovery import RecoveryPolicy as RecoveryPolicy
    from helmsman.controller._training.train_controller import TrainController as TrainController
    from helmsman.controller._weights.sync import WeightSync as WeightSync

_HOMES: dict[str, str] = {
    alias.name: str(node.module)
    for block in ast.parse(pkgutil.get_data(__name__, "__init__.py") or b"").body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Name -> defining module, parsed from the imports above so that they are listed only once."""

_MODULES = ("errors", "policies", "recipes", "testing", "weights", "worker_groups")

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the imports above are the one list of names


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'helmsman' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
