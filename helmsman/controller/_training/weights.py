"""TrainWeights: the weights of a training job, and their version."""

from __future__ import annotations

import asyncio
from typing import Any

from helmsman.api.errors import HelmsmanError
from helmsman.api.scheduler import Call, ResultHandle, Worker
from helmsman.api.weights import IntoMemory, WeightFormat, WeightTarget
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._roles.call_all import release
from helmsman.controller._training.ranks import Ranks


class TrainWeights:
    """The WeightSource of a TrainController."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.scheduler, self.role = ranks.scheduler, ranks.role
        self.group_id = ""
        """See WeightPeer."""
        self._highest: int | None = None
        """The highest version that was told or set."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """See WeightPeer."""
        return self._ranks.workers

    # --- version ----------------------------------------------------------------------------------------------------

    async def version(self, timeout: float | None = None) -> int:
        """See WeightSource."""
        versions: list[int] = await self._ranks.replicated("get_version", timeout=timeout)
        if len(set(versions)) > 1:
            found = {worker.id: version for worker, version in zip(self.workers, versions, strict=True)}
            raise HelmsmanError(
                f"the ranks of role {self.role!r} hold different weight versions: {found}. Load one checkpoint on all of them.",
                role=self.role,
                versions=found,
            )
        self._note(versions[0])
        return versions[0]

    async def set_version(self, version: int) -> None:
        """Set the version on all ranks."""
        await self._ranks.replicated("set_version", version)
        self._note(version)

    async def raise_version(self) -> int:
        """Set a version above all that were told before, unless the weights have one; returns it."""
        before = self._highest
        version = await self.version()
        if before is not None and version <= before:
            version = before + 1
            await self.set_version(version)
        return version

    def _note(self, version: int) -> None:
        self._highest = version if self._highest is None else max(version, self._highest)

    # --- transfer ---------------------------------------------------------------------------------------------------

    async def gather(self, timeout: float | None) -> ResultHandle:
        """Gather all parameters on rank 0 and return their handle."""
        handle = await self._ranks.on_root("export_weights", timeout=timeout, keep=True)
        if not isinstance(handle, ResultHandle):
            raise HelmsmanError(
                f"{self.workers[0].id}: export_weights returned {type(handle).__name__} on rank 0, not the parameters.",
                role=self.role,
            )
        return handle

    async def export(self, version: int, timeout: float) -> ResultHandle:
        """See WeightSource."""
        deadline = Deadline(timeout)
        handle = await self.gather(deadline.remaining_s)
        try:
            exported = await self.version(deadline.remaining_s)
            if exported != version:
                raise HelmsmanError(
                    f"role {self.role!r} went on to weight version {exported} while version {version} was exported; which of "
                    "them the export has is not known, and no instance was given it. Take no step, and load nothing, until "
                    "update_rollout has returned; then call it again.",
                    role=self.role,
                    versions=(version, exported),
                )
        except BaseException:
            await asyncio.to_thread(release, self.scheduler, handle)
            raise
        return handle

    async def publish(self, target: WeightTarget, form: WeightFormat, timeout: float | None) -> Any:
        """See WeightSource."""
        keep = isinstance(target, IntoMemory)
        return await self._ranks.on_root("publish_weights", target, form, timeout=timeout, keep=keep)

    async def open_store(self, timeout: float | None) -> int:
        """See WeightSource."""
        root = self.workers[0]
        (port,) = await self._ranks.call("open_weight_store", {root.id: Call((root.ip,))}, timeout)
        return int(port)
