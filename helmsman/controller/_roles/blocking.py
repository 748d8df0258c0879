"""The blocking forms of a controller's ``async`` methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._validation.argument_types import checked

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """The method without the ``a`` of an ``async`` method's name, which blocks until that has ended on Helmsman's event loop.

    It has the same arguments, checks and documentation. An interrupt of the waiting thread cancels the coroutine.
    """
    core: Any = inspect.unwrap(method)

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = run_sync(core(self, *args, **kwargs))
        return result

    functools.update_wrapper(call, core)
    call.__name__ = core.__name__.removeprefix("a")
    call.__qualname__ = f"{core.__qualname__.rpartition('.')[0]}.{call.__name__}"
    return checked(call)
