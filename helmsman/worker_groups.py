"""Worker groups: the workers of one role, with methods that declare their dispatch."""

from helmsman.api.dispatch import AxisSharding as AxisSharding
from helmsman.api.dispatch import Collect as Collect
from helmsman.api.dispatch import Dispatch as Dispatch
from helmsman.api.dispatch import Execute as Execute
from helmsman.api.dispatch import Replicate as Replicate
from helmsman.api.dispatch import Shard as Shard
from helmsman.api.parts import balanced_order as balanced_order
from helmsman.api.register import register as register
from helmsman.api.topology import RankInfo as RankInfo
from helmsman.api.worker_group import ClusterConfig as ClusterConfig
from helmsman.api.worker_group import GroupWorker as GroupWorker
from helmsman.controller._groups.cluster import Cluster as Cluster
from helmsman.controller._groups.cluster_handle import ClusterHandle as ClusterHandle
from helmsman.controller._groups.resource_manager import ResourceManager as ResourceManager

__all__ = [
    "AxisSharding",
    "Cluster",
    "ClusterConfig",
    "ClusterHandle",
    "Collect",
    "Dispatch",
    "Execute",
    "GroupWorker",
    "RankInfo",
    "Replicate",
    "ResourceManager",
    "Shard",
    "balanced_order",
    "register",
]
