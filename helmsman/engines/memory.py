"""A small engine beside others, which says what their process holds."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from helmsman.api.memory import MemoryFigures
from helmsman.api.platforms import current_platform


class MemoryProbe:
    """Answers beside whatever runs in its worker."""

    async def figures(self) -> MemoryFigures:
        """Of this process. It does not make a process use a device that it has not used so far, which costs memory there."""
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        host_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
        kind = current_platform.name
        if kind == "cpu" or not torch.get_device_module(current_platform.device_type).is_initialized():
            return MemoryFigures(host_bytes=host_bytes)
        stats = current_platform.memory_stats()
        return MemoryFigures(
            device=kind,
            allocated_bytes=stats.allocated_bytes,
            reserved_bytes=stats.reserved_bytes,
            free_bytes=stats.free_bytes,
            total_bytes=stats.total_bytes,
            host_bytes=host_bytes,
        )
