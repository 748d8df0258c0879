"""The two forms of an operation: ``x`` blocks, and ``async_x`` is awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def begin_in_thread(
    function: Callable[..., T], *arguments: Any, name: str = "helmsman-blocking"
) -> concurrent.futures.Future[T]:
    """Run a function in a new daemon thread. Cancelling the future has no effect.

    Args:
        function: The function to run.
        *arguments: Its positional arguments.
        name: Name of the thread.

    Returns:
        A future of the function's result.
    """
    ended: concurrent.futures.Future[T] = concurrent.futures.Future()
    ended.set_running_or_notify_cancel()

    def work() -> None:
        try:
            ended.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            ended.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return ended


async def run_in_new_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Await a blocking function that runs in a new thread.

    An event loop's executor has few threads; blocking calls that wait for each other could occupy
    all of them.

    Args:
        function: The function to run.
        *arguments: Its positional arguments.

    Returns:
        The function's result.
    """
    return await asyncio.wrap_future(begin_in_thread(function, *arguments))


def awaitable(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the ``async_x`` form of a blocking method ``x``, with the same arguments and errors.

    It calls the method of that name, so a subclass overrides both forms at once. Cancelling the
    await does not undo the operation.
    """
    name = method.__name__

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound: Callable[..., T] = functools.partial(getattr(self, name), *args, **kwargs)
        return await run_in_new_thread(bound)

    functools.update_wrapper(call, method)
    vars(call).pop("__isabstractmethod__", None)  # A subclass defines only ``x``.
    call.__name__ = f"async_{name}"
    call.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{call.__name__}"
    return call
