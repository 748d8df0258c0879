"""A small engine that reports the memory use of its worker's process."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch

from helmsman.api.platforms import MemoryStats, current_platform


class MemoryProbe:
    """Memory use of a worker's process; runs beside the worker's other engines."""

    async def figures(self) -> MemoryStats:
        """Measure the process's memory, in bytes.

        A device that the process has not used is not initialised: that would cost memory there.
        """
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        host_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
        if (
            current_platform.name == "cpu"
            or not torch.get_device_module(current_platform.device_type).is_initialized()
        ):
            return MemoryStats(host_bytes=host_bytes)
        return msgspec.structs.replace(current_platform.memory_stats(), host_bytes=host_bytes)
