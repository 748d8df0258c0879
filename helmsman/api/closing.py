"""Base classes of context managers that start and close themselves."""

from __future__ import annotations

import abc
from typing import Self

from helmsman.api.forms import awaitable


class Closing(abc.ABC):
    """A context manager, sync or async, that closes itself on exit."""

    __slots__ = ()

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources."""

    async_close = awaitable(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.async_close()


class Starting(Closing):
    """A context manager, sync or async, that starts itself on entry unless already started."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def is_started(self) -> bool:
        """Whether ``initialize`` has succeeded; stays True after ``close``."""

    @abc.abstractmethod
    def initialize(self) -> None:
        """Start in the caller's thread, so that an interrupt reaches the start itself."""

    async_initialize = awaitable(initialize)

    def __enter__(self) -> Self:
        if not self.is_started:
            self.initialize()
        return self

    async def __aenter__(self) -> Self:
        if not self.is_started:
            await self.async_initialize()
        return self
