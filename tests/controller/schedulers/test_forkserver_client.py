"""The driver's end of the forkserver of local workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman.controller._schedulers.forkserver_client import ForkServer


async def test_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Not a directory"):
        await ForkServer.start("0123456789", tmp_path, Path("/dev/null/forkserver.log"), ())
    assert len(os.listdir("/proc/self/fd")) == num_open
