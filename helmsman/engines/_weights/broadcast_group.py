"""A torch.distributed backend that stands alone and fails without ending its process.

torch's default group is the training job's, and ``new_group`` accepts only its members. So the
backend's group is created here, directly on a store of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helmsman.api.platforms import current_platform
from helmsman.engines._models.gloo_listeners import closed_afterwards

_POLL_S = 0.0002
_NOTICE_S = 0.25
"""Interval at which members look whether another one has left."""
_BACKEND_LIMIT = timedelta(days=1)
"""Limit of NCCL and HCCL themselves, above any of ours: when it passes, they may end the process.
"""
_ABORTED = "aborted"
"""Key of the store that a member sets when it leaves."""
_REPORT_ONLY = "0"
"""Value of *_ASYNC_ERROR_HANDLING that keeps a watchdog from ending the process after an error."""


class BroadcastGroup:
    """Broadcasts from rank 0 to the other members of a group.

    Args:
        backend: ``gloo``, ``nccl`` or ``hccl``.
        store: Store at which the members meet.
        rank: Rank of this process.
        world_size: Number of members.
        limit_s: Longest time in seconds for the members to meet.

    Raises:
        ValueError: The backend is unknown.
        RuntimeError: The members did not meet in time.
    """

    def __init__(
        self, backend: str, store: dist.Store, rank: int, world_size: int, limit_s: float
    ) -> None:
        self._is_aborted = threading.Event()
        self._store = store
        with closed_afterwards():
            self._group = _make_group(backend, store, rank, world_size, timedelta(seconds=limit_s))

    def broadcast(self, tensor: torch.Tensor, limit_s: float) -> None:
        """Broadcast rank 0's contiguous tensor into the members' tensors of the same size.

        Args:
            tensor: Any shape and dtype, on the group's device.
            limit_s: Longest time in seconds.

        Raises:
            RuntimeError: A member has left or is late, or ``abort`` was called.
        """
        self.begin_broadcast(tensor, limit_s)()

    def begin_broadcast(self, tensor: torch.Tensor, limit_s: float) -> Callable[[], None]:
        """Begin a broadcast, which only reads ``tensor`` on rank 0.

        Args:
            tensor: Contiguous, any shape and dtype, on the group's device.
            limit_s: Longest time in seconds from now.

        Returns:
            A function that waits for the end; it raises RuntimeError if a member left or is late.

        Raises:
            RuntimeError: A member has left, or ``abort`` was called.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=limit_s)
        work = self._group.broadcast([tensor], options)
        begun = time.monotonic()

        def finish() -> None:
            noticed = time.monotonic()
            # wait() of NCCL and HCCL only orders streams. The next synchronization would block in
            # the kernel, which never ends if a member has died.
            while not work.is_completed():
                now = time.monotonic()
                if now > begun + limit_s:
                    raise RuntimeError(f"a broadcast did not end within {limit_s:g} s")
                if now > noticed + _NOTICE_S:
                    # An abort of gloo does not end the broadcasts of the other members.
                    noticed = now
                    if self._store.check([_ABORTED]):
                        raise RuntimeError("another member has left the group")
                time.sleep(_POLL_S)
            if self._is_aborted.is_set():
                raise RuntimeError("the broadcast was aborted")
            work.wait()
            current_platform.synchronize()

        return finish

    def abort(self) -> None:
        """End broadcasts in progress, here and at the other members; from any thread."""
        self._is_aborted.set()
        with suppress(RuntimeError):  # of a store that is gone
            self._store.set(_ABORTED, "")
        # ProcessGroupHCCL inherits an abort() that does nothing.
        abort_hccl = getattr(self._group, "abort_hccl_comm", None)
        if abort_hccl is not None:
            abort_hccl("left the group")
        else:
            self._group.abort()


def _make_group(
    backend: str, store: dist.Store, rank: int, world_size: int, limit: timedelta
) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout=limit)
    if backend == "nccl":
        made: Any = dist.ProcessGroupNCCL
    elif backend == "hccl":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        made = ProcessGroupHCCL
    else:
        raise ValueError(f"weights cannot be sent by {backend!r}; expected gloo, nccl or hccl")
    options = made.Options()
    options._timeout = _BACKEND_LIMIT
    prefix = "TORCH_NCCL" if backend == "nccl" else "HCCL"
    with _variable(f"{prefix}_ASYNC_ERROR_HANDLING", _REPORT_ONLY):
        return made(store, rank, world_size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable during the block, for a constructor that reads it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
