"""Process group of a training job, collective error checks on its ranks, and tensors by name.

Several engines of one process (an actor and its reference model, or all trainers of the inline
scheduler) share the default group. The first engine creates it, and the last one to leave destroys
it. A group created elsewhere is never destroyed here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from helmsman._wire.group_keys import KEY_VARIABLE
from helmsman.api.platforms import current_platform
from helmsman.engines._models.gloo_listeners import closed_afterwards
from helmsman.engines._models.store import GroupStore, meet

_lock = threading.RLock()
"""Held while engines in threads of one process (inline) join or leave the group. Reentrant, since a
garbage collection may free an engine, which then leaves.
"""
_group: dist.ProcessGroup | None = None
"""The default group, if it was created here."""
_store: GroupStore | None = None
"""The store of that group, if its ranks have a key."""
_num_users = 0


def environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as exc:
        raise ValueError(
            f"the environment variable {name} is {text!r}; expected an integer"
        ) from exc


def local_device_index() -> int:
    """Index of this rank's device: LOCAL_RANK, or 0 if the process sees only one device."""
    return 0 if current_platform.device_count() == 1 else environment_int("LOCAL_RANK", 0)


def join_process_group(
    *, rendezvous_timeout_s: float, collective_timeout_s: float
) -> dist.ProcessGroup | None:
    """Join the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    A job of one rank needs no address and opens no port. Returns the group, which the caller must
    leave; None if it was created elsewhere.

    Raises:
        ConnectionError: Not all ranks joined in time.
        ValueError: The environment has no address or port, or the process has a group of another
            size.
    """
    with _lock:
        return _join(rendezvous_timeout_s, collective_timeout_s)


def _join(rendezvous_timeout_s: float, collective_timeout_s: float) -> dist.ProcessGroup | None:
    global _group, _num_users
    if dist.is_initialized():
        size = dist.get_world_size()
        if (expected := environment_int("WORLD_SIZE", size)) != size:
            raise ValueError(
                f"the process group was not joined (pid {os.getpid()}): this process has a default "
                f"process group of {size} ranks, expected WORLD_SIZE, {expected}. Destroy that "
                "group first, or use the 'local' scheduler, whose workers are processes of their "
                "own"
            )
        if dist.group.WORLD is not _group:
            return None
        _num_users += 1
        return _group
    rank, world_size = environment_int("RANK", 0), environment_int("WORLD_SIZE", 1)
    device_type, backend = current_platform.device_type, current_platform.communication_backend
    store = _meet(rank, world_size, rendezvous_timeout_s)
    try:
        with closed_afterwards():
            dist.init_process_group(
                # The host backend serves small objects and optimizer scalars, which are on the
                # host.
                "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend}",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=collective_timeout_s),
            )
    except BaseException:
        _close_store()  # or the next attempt would meet its keys
        raise
    _group, _num_users = dist.group.WORLD, 1
    return _group


def _meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    global _store
    if world_size == 1:
        return dist.HashStore()
    address, port = os.environ.get("MASTER_ADDR", ""), environment_int("MASTER_PORT", 0)
    if not address or not port:
        raise ValueError(
            f"rank {rank} of {world_size} needs MASTER_ADDR and MASTER_PORT; they are {address!r} "
            f"and {port or ''!r}"
        )
    key = os.environ.get(KEY_VARIABLE, "")
    try:
        if key:
            _store = meet(address, port, key, rank=rank, world_size=world_size, timeout_s=timeout_s)
            return _store
        # Another launcher started the ranks, so that they have no secret in common.
        return dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=timeout_s)
        )
    except (dist.DistError, OSError) as exc:
        hint = (
            "is the port in use?" if rank == 0 else "is rank 0 running, and can this node reach it?"
        )
        if isinstance(exc, TimeoutError):
            hint = str(exc)
        raise ConnectionError(
            f"rank {rank} of {world_size} did not connect to the other ranks at {address}:{port} "
            f"within {timeout_s:g} s; {hint} Check the ranks that did not report this error."
        ) from exc


def leave_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Leave a group that join_process_group returned; by default, the last one.

    Nothing happens if the group was aborted, or if the script has destroyed it and another one was
    created since.
    """
    global _group, _num_users
    with _lock:
        if _group is None or group not in (None, _group):
            return
        group = _group
        _num_users -= 1
        if _num_users == 0:
            _group = None
            if group is dist.group.WORLD:
                dist.destroy_process_group()
            _close_store()


def abort_process_groups() -> None:
    """End the collectives of all groups of this process, which cannot be used any more.

    From any thread.
    """
    global _group, _num_users
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
    _group, _num_users = None, 0
    _close_store()


def _close_store() -> None:
    global _store
    store, _store = _store, None
    if store is not None:
        store.close()


def gather_objects(value: Any) -> list[Any]:
    """Gather a small picklable value of every rank, by rank, on every rank. A collective."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Raise an error on every rank if the block fails on any rank. A collective.

    Without it, the other ranks would hang in the next collective. The block itself must not
    communicate. The failed rank raises its own error, SystemExit included, and the others
    RuntimeError. An interrupt (KeyboardInterrupt) is not shared: it must end its process at once.
    """
    error: Exception | SystemExit | None = None
    try:
        yield
    # Any error must be reported, or the other ranks would wait for this one.
    except (Exception, SystemExit) as exc:  # noqa: BLE001
        error = exc
    failures = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if failed:
        # The controller recognises this text as a secondary error
        # (helmsman/controller/_groups/call_all.py). Do not change it.
        raise RuntimeError(
            f"{what} failed on another rank, so this one did not go on. {'; '.join(failed)}"
        )


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, or their shards, by name.

    A tensor with several names (tied embeddings) is included once, under the first one.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
