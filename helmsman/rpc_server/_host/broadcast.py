"""Arguments of a call to an initialised train engine: given to the data-parallel head, broadcast inside its model-parallel
group.

The group first agrees that every rank is ready. Without that, one rank whose arguments do not load would raise while the others
wait in the broadcast until the collective's time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helmsman.api.errors import CallError, PeerNotReadyError
from helmsman.rpc_server._wire.messages import Request


def needs_broadcast(engine: Any, asked: bool | None) -> bool:
    """Whether the arguments of a call come from the head of the engine's model-parallel group."""
    if asked is False:
        return False
    return getattr(engine, "model_parallel_group", None) is not None


def broadcast_arguments(
    engine: Any, load: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], worker_id: str, request: Request
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The head's (args, kwargs) on every rank of the engine's model-parallel group.

    Raises: the rank's own error where its arguments do not load, PeerNotReadyError on the others.
    """
    import torch.distributed as dist

    group = engine.model_parallel_group
    is_head = dist.get_rank(group) == 0
    failure: CallError | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    if is_head:
        try:
            arguments = load()
        except CallError as error:
            failure = error
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise PeerNotReadyError(
            worker_id=worker_id,
            engine_name=request.engine_name,
            method=request.method,
            ranks=failed,
            reason=str(reasons[failed[0]]),
        )
    box = [arguments if is_head else None]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    received = box[0]
    assert received is not None
    return received
