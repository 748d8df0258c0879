"""The adapters that a trainer has sent to a server, one for each version that requests use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.engines._serving.requests import Requests


class TrainedAdapters:
    """The adapter of new requests, and earlier ones with which requests in flight end.

    Args:
        requests: The requests of the server.
        unload: Unloads an adapter that no request uses.
    """

    def __init__(self, requests: Requests, unload: Callable[[Any], Awaitable[None]]) -> None:
        self._requests, self._unload = requests, unload
        self.newest: Any = None
        """The adapter of new requests; None if they use the base model."""
        self._loaded: list[Any] = []

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Continue one prompt with the newest adapter; see Requests.generate."""
        version = None if self.newest is None else self._requests.version
        return await self._requests.generate(requests, self.newest, version)

    async def serve(self, adapter: Any, version: int) -> None:
        """Serve a version from now on.

        Args:
            adapter: Its adapter, which is loaded; requests in flight keep theirs. None for a whole
                model, with which requests in flight continue; they are held.
            version: The version.
        """
        requests = self._requests
        if adapter is None:
            await requests.leave_adapters(self._loaded)
        else:
            requests.keep_versions()
        self.newest, requests.version = adapter, version
        self._loaded += [] if adapter is None else [adapter]
        used = {id(adapter), *(id(each.adapter) for each in requests.generations.values())}
        for old in [each for each in self._loaded if id(each) not in used]:
            self._loaded = [each for each in self._loaded if each is not old]
            await self._unload(old)

    async def end(self, heir: TrainedAdapters) -> None:
        """End all requests as aborted; the next update of ``heir`` unloads the adapters.

        Until then the server may compute with them.
        """
        await self._requests.abort(None)
        heir._loaded += self._loaded
