"""What a controller asks of the turns that it takes with another one."""

from __future__ import annotations

from typing import Protocol


class Turn(Protocol):
    """Whose devices these are now."""

    def require(self, role: str, method: str) -> None:
        """Raise DevicesNotOwnedError unless it is this role's turn."""

    async def explain(self, error: BaseException) -> None:
        """Raise DeviceMemoryError from an error that comes from devices without room."""

    def make_room(self) -> None:
        """Have the devices free for a trainer that is built anew."""
