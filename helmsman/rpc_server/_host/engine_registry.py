"""EngineRegistry: the engines of one worker by name, their methods, failures and destruction."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from helmsman._process.command import CommandEngine
from helmsman._wire.messages import Request, dotted
from helmsman.api import errors
from helmsman.api.engines import InferenceEngine
from helmsman.api.suggestions import nearest
from helmsman.rpc_server._host.threads import EngineLoop

_PROPERTIES = property, functools.cached_property


class EngineRegistry:
    """The named engines of one worker, in the order of their creation.

    Args:
        worker_id: Id of the worker, for errors.
        loop: Runs async ``destroy`` methods.
        say: Logs a line.
    """

    def __init__(self, worker_id: str, loop: EngineLoop, say: Callable[..., None]) -> None:
        self._worker_id, self._loop, self._say = worker_id, loop, say
        self._engines: dict[str, Any] = {}
        self._creating: set[str] = set()
        self._lock = threading.Lock()

    def claim(self, name: str) -> None:
        """Reserve the name of an engine that is about to be created.

        Raises:
            EngineExistsError: An engine has the name already, or is being created under it.
        """
        with self._lock:
            if name in self._engines or name in self._creating:
                engine_type = (
                    type(self._engines[name]).__qualname__
                    if name in self._engines
                    else "engine under construction"
                )
                raise errors.EngineExistsError(
                    worker_id=self._worker_id, engine_name=name, engine_type=engine_type
                )
            self._creating.add(name)

    def release(self, name: str) -> None:
        """End the reservation of a name, after the creation or instead of it."""
        self._creating.discard(name)

    def add(self, name: str, engine: Any) -> None:
        self._engines[name] = engine

    def by_name(self) -> Mapping[str, Any]:
        """Return a view, which keeps no destroyed engine alive."""
        return types.MappingProxyType(self._engines)

    def types(self) -> dict[str, str]:
        """Return the class of each engine, by name."""
        return {name: type(engine).__qualname__ for name, engine in list(self._engines.items())}

    def failures(self) -> dict[str, str]:
        """Return why engines cannot serve, by name."""
        failures = {}
        for name, engine in list(self._engines.items()):
            if not isinstance(engine, (InferenceEngine, CommandEngine)):
                continue
            try:
                reason = engine.failure()
            # Engine code may raise anything, and health must still be answered.
            except Exception as error:  # noqa: BLE001
                reason = f"{dotted(name, 'failure')} raised {type(error).__name__}: {error}"
            if reason is not None:
                failures[name] = str(reason)
        return failures

    def find(self, request: Request) -> tuple[Any, Callable[..., Any]]:
        """Return the engine and the method of a call.

        Raises:
            EngineNotFoundError: There is no such engine.
            MethodNotFoundError: It has no such public method.
        """
        name = str(request.engine_name)
        engine = self._engines.get(name)
        if engine is None:
            raise errors.EngineNotFoundError(
                name=name, known=list(self._engines), where=f"worker {self._worker_id}"
            )
        method, reason = None, ""
        if request.method.startswith("_"):
            reason = "it is private"
        elif isinstance(_in_class(type(engine), request.method), _PROPERTIES):
            # Its code must not run on this thread, which answers health requests.
            reason = "it is a property"
        else:
            method = getattr(engine, request.method, None)
            reason = "" if method is None else "it is not callable"
        if not callable(method):
            public = [
                m
                for m in dir(type(engine))
                if not m.startswith("_") and callable(getattr(type(engine), m, None))
            ]
            raise errors.MethodNotFoundError(
                worker_id=self._worker_id,
                engine_name=name,
                method=request.method,
                engine_type=type(engine).__qualname__,
                suggestions=nearest(request.method, public),
                reason=reason,
            )
        return engine, method

    def destroy(self, names: list[str] | None, limit_s: float) -> tuple[list[str], list[str]]:
        """Destroy engines, newest first; a failure does not keep the other engines alive.

        Each name is free before the engine's ``destroy`` begins.

        Args:
            names: Names of the engines; None destroys all.
            limit_s: Longest wait in seconds for all async ``destroy`` methods together. The engine
                thread then continues.

        Returns:
            Descriptions of the failures, and the names of the engines whose ``destroy`` has not
            ended.
        """
        deadline = time.monotonic() + limit_s
        problems, unfinished = [], []
        for name, engine in reversed(list(self._engines.items())):
            if names is not None and name not in names:
                continue
            del self._engines[name]
            try:
                destroy = getattr(engine, "destroy", None)
                result = destroy() if callable(destroy) else None
                if inspect.isawaitable(result):
                    done = threading.Event()
                    self._loop.submit(
                        None, dotted(name, "destroy"), functools.partial(_await_then, result, done)
                    )
                    if not done.wait(max(0.0, deadline - time.monotonic())):
                        unfinished.append(name)
                        problems.append(
                            f"{dotted(name, 'destroy')} did not end within {limit_s:.3g} s; it "
                            "continues in the background"
                        )
                        continue
            # An engine's own clean-up may raise anything.
            except BaseException as error:  # noqa: BLE001
                problems.append(f"{dotted(name, 'destroy')} raised {type(error).__name__}: {error}")
            self._say("engine %s is destroyed", name)
        return problems, unfinished


def _in_class(engine_type: type, name: str) -> object:
    """Return an attribute of a class without running code; inspect.getattr_static is slow."""
    return next((vars(each)[name] for each in engine_type.__mro__ if name in vars(each)), None)


async def _await_then(awaitable: Any, done: threading.Event) -> None:
    try:
        await awaitable
    finally:
        done.set()
