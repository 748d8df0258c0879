"""Worker side of a RewardPool: an engine that wraps the user's function."""

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
    """Returned instead of a score: the function was cancelled after ``elapsed_s`` seconds."""

    elapsed_s: float


class RewardEngine:
    """Scores with a function: synchronous on the engine thread, async on the event loop.

    Args:
        function: A callable, or its import path 'package.module.function'.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: The module has no such function.
        TypeError: The object is not callable.
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
            raise TypeError(f"the reward function is {function!r}, expected a callable")
        self._function: Callable[..., Any] = function

    def is_async(self) -> bool:
        # A callable object whose __call__ is async.
        by_call = getattr(type(self._function), "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(by_call)

    def score(self, call: Arguments) -> Any:
        args, kwargs = call
        return self._function(*args, **kwargs)

    async def async_score(self, call: Arguments, limit_s: float) -> Any:
        """Score with an async function; returns Overtime if it exceeds the limit.

        A function that suppresses its cancellation continues in the background.
        """
        args, kwargs = call
        started = time.monotonic()
        work = asyncio.ensure_future(self._function(*args, **kwargs))
        await asyncio.wait([work], timeout=limit_s)
        if not work.done():
            work.cancel()
            # Retrieves the exception, which asyncio would otherwise log.
            work.add_done_callback(lambda work: work.cancelled() or work.exception())
            return Overtime(time.monotonic() - started)
        return work.result()
