"""Weight synchronisation from a trainer to rollout instances."""

from helmsman.api.weights import WeightFormat as WeightFormat
from helmsman.controller._weights.sync import SyncReport as SyncReport
from helmsman.controller._weights.sync import WeightSync as WeightSync
from helmsman.controller._weights.transport import ViaDisk as ViaDisk
from helmsman.controller._weights.transport import ViaMemory as ViaMemory
from helmsman.controller._weights.via_collective import ViaCollective as ViaCollective
from helmsman.controller._weights.via_device import ViaDevice as ViaDevice

__all__ = [
    "SyncReport",
    "ViaCollective",
    "ViaDevice",
    "ViaDisk",
    "ViaMemory",
    "WeightFormat",
    "WeightSync",
]
