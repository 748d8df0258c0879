"""Weight synchronisation from a trainer to rollout instances."""

from helmsman.api.weights import WeightFormat as WeightFormat
from helmsman.controller._weight_sync.sync import SyncReport as SyncReport
from helmsman.controller._weight_sync.sync import WeightSync as WeightSync
from helmsman.controller._weight_sync.transport import ViaDisk as ViaDisk
from helmsman.controller._weight_sync.transport import ViaMemory as ViaMemory
from helmsman.controller._weight_sync.via_collective import ViaCollective as ViaCollective
from helmsman.controller._weight_sync.via_device import ViaDevice as ViaDevice

__all__ = [
    "SyncReport",
    "ViaCollective",
    "ViaDevice",
    "ViaDisk",
    "ViaMemory",
    "WeightFormat",
    "WeightSync",
]
