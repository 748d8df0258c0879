"""Helmsman: the single-controller scheduler for LLM post-training.

Importing this loads neither torch nor ray; each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from helmsman.api.version import __version__ as __version__

if TYPE_CHECKING:
    from helmsman.api.batch import Batch as Batch
    from helmsman.api.cluster_config import ClusterConfig as ClusterConfig
    from helmsman.api.columns import Ragged as Ragged
    from helmsman.api.dispatch import AxisSharding as AxisSharding
    from helmsman.api.dispatch import Collect as Collect
    from helmsman.api.dispatch import Dispatch as Dispatch
    from helmsman.api.dispatch import Execute as Execute
    from helmsman.api.dispatch import Replicate as Replicate
    from helmsman.api.dispatch import Shard as Shard
    from helmsman.api.dispatch import register as register
    from helmsman.api.engines import InferenceEngine as InferenceEngine
    from helmsman.api.engines import TrainEngine as TrainEngine
    from helmsman.api.errors import HelmsmanError as HelmsmanError
    from helmsman.api.faults import DropNode as DropNode
    from helmsman.api.faults import Hang as Hang
    from helmsman.api.faults import Kill as Kill
    from helmsman.api.faults import Slow as Slow
    from helmsman.api.generation import GenerationRequest as GenerationRequest
    from helmsman.api.generation import GenerationResult as GenerationResult
    from helmsman.api.generation import SamplingParams as SamplingParams
    from helmsman.api.platforms import current_platform as current_platform
    from helmsman.api.scheduler import EngineSpec as EngineSpec
    from helmsman.api.scheduler import Job as Job
    from helmsman.api.scheduler import Leaving as Leaving
    from helmsman.api.scheduler import ResultHandle as ResultHandle
    from helmsman.api.scheduler import Scheduler as Scheduler
    from helmsman.api.scheduler import SchedulingSpec as SchedulingSpec
    from helmsman.api.scheduler import SchedulingStrategy as SchedulingStrategy
    from helmsman.api.scheduler import Timeouts as Timeouts
    from helmsman.api.scheduler import Worker as Worker
    from helmsman.api.topology import RankInfo as RankInfo
    from helmsman.api.weights import WeightFormat as WeightFormat
    from helmsman.api.worker_group import GroupWorker as GroupWorker
    from helmsman.controller.bootstrap.initialize import initialize as initialize
    from helmsman.controller.checkpoints import Checkpoints as Checkpoints
    from helmsman.controller.cluster import Cluster as Cluster
    from helmsman.controller.drill import Drill as Drill
    from helmsman.controller.drill import FaultRecord as FaultRecord
    from helmsman.controller.factory import make_scheduler as make_scheduler
    from helmsman.controller.fault_plan import FaultPlan as FaultPlan
    from helmsman.controller.generation.health import SupervisionPolicy as SupervisionPolicy
    from helmsman.controller.generation.request import RequestOptions as RequestOptions
    from helmsman.controller.generation.retries import RetryGeneration as RetryGeneration
    from helmsman.controller.generation.retries import RetryUnbegun as RetryUnbegun
    from helmsman.controller.generation.rewards import RewardPool as RewardPool
    from helmsman.controller.generation.routing import LeastOutstandingTokens as LeastOutstandingTokens
    from helmsman.controller.generation.routing import PrefixAffinity as PrefixAffinity
    from helmsman.controller.generation.routing import RoundRobin as RoundRobin
    from helmsman.controller.generation.routing import SessionAffinity as SessionAffinity
    from helmsman.controller.generation.sampling import BoundedStaleness as BoundedStaleness
    from helmsman.controller.generation.scheduler import GenerateScheduler as GenerateScheduler
    from helmsman.controller.generation.workflows import WorkflowExecutor as WorkflowExecutor
    from helmsman.controller.inline import InlineScheduler as InlineScheduler
    from helmsman.controller.local import LocalScheduler as LocalScheduler
    from helmsman.controller.ray_scheduler import RayScheduler as RayScheduler
    from helmsman.controller.ray_scheduler import (
        get_placement_group_master_ip_and_port as get_placement_group_master_ip_and_port,
    )
    from helmsman.controller.recovery_policy import RecoveryPolicy as RecoveryPolicy
    from helmsman.controller.resource_manager import ResourceManager as ResourceManager
    from helmsman.controller.rollout import RolloutController as RolloutController
    from helmsman.controller.train import TrainController as TrainController
    from helmsman.controller.train_recovery import RecoverableTraining as RecoverableTraining
    from helmsman.controller.turns import Turns as Turns
    from helmsman.controller.weight_sync import ViaCollective as ViaCollective
    from helmsman.controller.weight_sync import ViaDisk as ViaDisk
    from helmsman.controller.weight_sync import ViaMemory as ViaMemory
    from helmsman.controller.weight_sync import WeightSync as WeightSync

_HOMES = {
    "AxisSharding": "helmsman.api.dispatch",
    "Batch": "helmsman.api.batch",
    "BoundedStaleness": "helmsman.controller.generation.sampling",
    "Checkpoints": "helmsman.controller.checkpoints",
    "Cluster": "helmsman.controller.cluster",
    "ClusterConfig": "helmsman.api.cluster_config",
    "Collect": "helmsman.api.dispatch",
    "Dispatch": "helmsman.api.dispatch",
    "Drill": "helmsman.controller.drill",
    "DropNode": "helmsman.api.faults",
    "EngineSpec": "helmsman.api.scheduler",
    "Execute": "helmsman.api.dispatch",
    "FaultPlan": "helmsman.controller.fault_plan",
    "FaultRecord": "helmsman.controller.drill",
    "GenerateScheduler": "helmsman.controller.generation.scheduler",
    "GenerationRequest": "helmsman.api.generation",
    "GenerationResult": "helmsman.api.generation",
    "GroupWorker": "helmsman.api.worker_group",
    "Hang": "helmsman.api.faults",
    "HelmsmanError": "helmsman.api.errors",
    "InferenceEngine": "helmsman.api.engines",
    "InlineScheduler": "helmsman.controller.inline",
    "Job": "helmsman.api.scheduler",
    "Kill": "helmsman.api.faults",
    "Leaving": "helmsman.api.scheduler",
    "LeastOutstandingTokens": "helmsman.controller.generation.routing",
    "LocalScheduler": "helmsman.controller.local",
    "PrefixAffinity": "helmsman.controller.generation.routing",
    "Ragged": "helmsman.api.columns",
    "RankInfo": "helmsman.api.topology",
    "RayScheduler": "helmsman.controller.ray_scheduler",
    "RecoverableTraining": "helmsman.controller.train_recovery",
    "RecoveryPolicy": "helmsman.controller.recovery_policy",
    "Replicate": "helmsman.api.dispatch",
    "RequestOptions": "helmsman.controller.generation.request",
    "ResourceManager": "helmsman.controller.resource_manager",
    "ResultHandle": "helmsman.api.scheduler",
    "RetryGeneration": "helmsman.controller.generation.retries",
    "RetryUnbegun": "helmsman.controller.generation.retries",
    "RewardPool": "helmsman.controller.generation.rewards",
    "RolloutController": "helmsman.controller.rollout",
    "RoundRobin": "helmsman.controller.generation.routing",
    "SamplingParams": "helmsman.api.generation",
    "Scheduler": "helmsman.api.scheduler",
    "SchedulingSpec": "helmsman.api.scheduler",
    "SchedulingStrategy": "helmsman.api.scheduler",
    "SessionAffinity": "helmsman.controller.generation.routing",
    "Shard": "helmsman.api.dispatch",
    "Slow": "helmsman.api.faults",
    "SupervisionPolicy": "helmsman.controller.generation.health",
    "Timeouts": "helmsman.api.scheduler",
    "TrainController": "helmsman.controller.train",
    "TrainEngine": "helmsman.api.engines",
    "Turns": "helmsman.controller.turns",
    "ViaCollective": "helmsman.controller.weight_sync",
    "ViaDisk": "helmsman.controller.weight_sync",
    "ViaMemory": "helmsman.controller.weight_sync",
    "WeightFormat": "helmsman.api.weights",
    "WeightSync": "helmsman.controller.weight_sync",
    "Worker": "helmsman.api.scheduler",
    "WorkflowExecutor": "helmsman.controller.generation.workflows",
    "current_platform": "helmsman.api.platforms",
    "get_placement_group_master_ip_and_port": "helmsman.controller.ray_scheduler",
    "initialize": "helmsman.controller.bootstrap.initialize",
    "make_scheduler": "helmsman.controller.factory",
    "register": "helmsman.api.dispatch",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the table is the one list of names


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'helmsman' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
