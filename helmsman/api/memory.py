"""What a process holds of a device and of its host, as figures that travel."""

from __future__ import annotations

import msgspec

_GIB = float(1 << 30)


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one worker's process, in bytes."""

    device: str = ""
    """Kind of its device; '' where the process has not used one, as on CPU."""
    allocated_bytes: int = 0
    """In its live tensors there."""
    reserved_bytes: int = 0
    """Taken from the device, live tensors included."""
    free_bytes: int = 0
    """What the device could still give, to any process."""
    total_bytes: int = 0
    """Size of the device."""
    host_bytes: int = 0
    """Resident on its host."""

    def __str__(self) -> str:
        host = f"{self.host_bytes / _GIB:.2f} GiB on the host"
        if not self.device:
            return f"no device, {host}"
        held = f"{self.allocated_bytes / _GIB:.2f} GiB allocated and {self.reserved_bytes / _GIB:.2f} GiB reserved"
        return f"{held} on {self.device} with {self.free_bytes / _GIB:.2f} of {self.total_bytes / _GIB:.2f} GiB free, {host}"
