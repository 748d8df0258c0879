"""Preparation of engine code: import, construction, and sharing arguments in a parallel group."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman._wire.codec import Payload, decode, encode
from helmsman._wire.messages import Request
from helmsman._wire.remote_errors import clipped, traceback_text
from helmsman.api import errors
from helmsman.api.extras import needed_by
from helmsman.api.topology import RankInfo
from helmsman.api.worker_group import GroupWorker


def import_engine(worker_id: str, name: str, path: str) -> Any:
    """Import an engine's class from 'package.module.Class' or 'package.module:Class'.

    Raises:
        EngineImportError: The import failed.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        if not module_name:
            raise ImportError("it has no module part")
        with needed_by(path):
            return getattr(importlib.import_module(module_name), attribute)
    except BaseException as error:
        reason = clipped(f"{type(error).__name__}: {error}")
        if not isinstance(error, (ImportError, AttributeError)):
            reason += "\n" + traceback_text(error)
        raise errors.EngineImportError(
            worker_id=worker_id, engine_name=name, engine_path=path, reason=reason
        ) from error


def construct(
    engine_type: Any, rank_info: RankInfo | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Construct an engine; a GroupWorker gets ``rank_info`` before its constructor runs."""
    if rank_info is None or not (
        isinstance(engine_type, type) and issubclass(engine_type, GroupWorker)
    ):
        return engine_type(*args, **kwargs)
    if type(engine_type).__call__ is not type.__call__:
        # A metaclass with its own way of creating instances: rank_info follows afterwards.
        engine = engine_type(*args, **kwargs)
        _set_rank_info(engine, rank_info)
        return engine
    engine = engine_type.__new__(engine_type, *args, **kwargs)
    _set_rank_info(engine, rank_info)
    engine_type.__init__(engine, *args, **kwargs)
    return engine


def _set_rank_info(engine: Any, rank_info: RankInfo) -> None:
    try:
        engine.rank_info = rank_info
    except AttributeError:  # a frozen data class
        object.__setattr__(engine, "rank_info", rank_info)


def is_pending(result: Any) -> bool:
    """Return whether a method returned a future or another awaitable, in place of its value."""
    return result is not None and (
        isinstance(result, concurrent.futures.Future) or inspect.isawaitable(result)
    )


async def settled(result: Any) -> Any:
    """Await a method's result, and any awaitable that it returns, until it is a value."""
    while is_pending(result):
        if isinstance(result, concurrent.futures.Future):
            result = asyncio.wrap_future(result)
        result = await result
    return result


BROADCAST_GROUPS = (
    "model_parallel_group",
    "context_and_model_parallel_group",
    "model_and_context_parallel_group",
    "get_model_parallel_group",
    "broadcast_group",
)
"""Attributes, properties or methods by which an engine provides its model-parallel group."""


def broadcast_group(engine: Any) -> Any | None:
    """Return the process group in which the head's arguments reach all ranks; None without one.

    An engine whose attribute ``initialized`` is False has no group yet.
    """
    own = getattr(engine, "__dict__", {})
    for name in BROADCAST_GROUPS:
        # Looked up in the class, since an engine's __getattr__ may raise anything.
        if name in own or hasattr(type(engine), name):
            if not getattr(engine, "initialized", True):
                return None
            group = getattr(engine, name, None)
            if (group := group() if callable(group) else group) is not None:
                return group
    return None


def arguments_of(
    engine: Any,
    load: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    worker_id: str,
    request: Request,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the (args, kwargs) of a call: its own, or the head's on all ranks of a group.

    Args:
        engine: The engine of this rank.
        load: Loads the call's own arguments.
        worker_id: This worker, for errors.
        request: The call.

    Raises:
        CallError: The arguments cannot be loaded, here or on the head.
    """
    group = None if request.broadcast is False else broadcast_group(engine)
    return load() if group is None else _broadcast_arguments(group, load, worker_id, request)


def _broadcast_arguments(
    group: Any,
    load: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    worker_id: str,
    request: Request,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the head's (args, kwargs) on every rank of the engine's model-parallel group.

    The ranks first agree that the head's arguments are loaded and encoded. Otherwise the other
    ranks would wait in the broadcast for a head that has failed. The codec encodes them, since
    torch's broadcast pickles without cloudpickle and refuses values that a call may carry.

    Args:
        group: The model-parallel group.
        load: Loads the arguments; called on the head only.
        worker_id: This worker, for errors.
        request: The call.

    Raises:
        CallError: The head's arguments cannot be loaded; raised on the head.
        CodecError: They cannot be encoded again; raised on the head. Or they load on the head, but
            not on this rank.
        PeerNotReadyError: The head has raised; raised on the other ranks.
    """
    import torch.distributed as dist

    is_head = dist.get_rank(group) == 0
    failure: errors.HelmsmanError | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    encoded: Any = b""
    if is_head:
        try:
            arguments = load()
            encoded = encode(arguments, root="arguments", inband_below=sys.maxsize).data
        except errors.HelmsmanError as error:
            failure = error
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise errors.PeerNotReadyError(
            worker_id=worker_id,
            engine_name=request.engine_name,
            method=request.method,
            ranks=failed,
            reason=str(reasons[failed[0]]),
        )
    box = [encoded]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return arguments if is_head else decode(Payload(box[0], [], []))
