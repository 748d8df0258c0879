"""A small engine beside others, which says what their process holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch

from helmsman.api.platforms import MemoryStats, current_platform


class MemoryProbe:
    """Answers beside whatever runs in its worker."""

    async def figures(self) -> MemoryStats:
        """Of this process. It does not make a process use a device that it has not used so far,
        which costs memory there.
        """
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        host_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
        if (
            current_platform.name == "cpu"
            or not torch.get_device_module(current_platform.device_type).is_initialized()
        ):
            return MemoryStats(host_bytes=host_bytes)
        return msgspec.structs.replace(current_platform.memory_stats(), host_bytes=host_bytes)
