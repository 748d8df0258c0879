"""The worker's side of a RewardPool: an engine around the user's function."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class Overtime(msgspec.Struct, frozen=True):
    """Instead of a score: the function was cancelled after so many seconds."""

    elapsed_s: float


class RewardEngine:
    """Scores by ``function``: a synchronous one on the engine thread, an async one on the event
    loop.

    Args:
        function: callable, or its import path 'package.module.function'.
    Raises: ImportError, AttributeError; TypeError for what cannot be called.
    """

    def __init__(self, function: str | Callable[..., Any]) -> None:
        if isinstance(function, str):
            module, _, name = function.replace(":", ".").rpartition(".")
            if not module:
                raise ImportError(
                    f"the reward function {function!r} has no module; expected "
                    "'package.module.function'"
                )
            function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"the reward function is {function!r}, which cannot be called")
        self._function: Callable[..., Any] = function

    def is_async(self) -> bool:
        # Of an object whose __call__ is async
        by_call = getattr(type(self._function), "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(by_call)

    def score(self, call: Arguments) -> Any:
        args, kwargs = call
        return self._function(*args, **kwargs)

    async def async_score(self, call: Arguments, limit_s: float) -> Any:
        """As score, awaited; Overtime when it takes longer than the limit. One that swallows its
        cancellation goes on, and nobody waits for it.
        """
        args, kwargs = call
        started = time.monotonic()
        work = asyncio.ensure_future(self._function(*args, **kwargs))
        await asyncio.wait([work], timeout=limit_s)
        if not work.done():
            work.cancel()
            # seen, though nobody waits for it
            work.add_done_callback(lambda work: work.cancelled() or work.exception())
            return Overtime(time.monotonic() - started)
        return work.result()
