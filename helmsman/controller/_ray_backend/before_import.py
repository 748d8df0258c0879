"""Environment variables that Ray reads once, when it is imported."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator


def choose_authentication() -> None:
    """Decide how an embedded cluster knows its own; before ray is imported, which is when Ray reads these variables.

    Always explicit: a local start without them writes a token file that changes what later clusters of this user demand. An
    embedded cluster gets a token of its own, so that no other user can join it.
    """
    is_embedded = os.environ.get("RAY_ADDRESS", "local") == "local"
    if "ray" not in sys.modules and is_embedded and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def outliving_the_raylet() -> Iterator[None]:
    """Import ray within it, so that the death of its raylet does not end this process.

    Ray ends a process whose raylet does not answer and has exited. It reads the raylet's pid from RAY_RAYLET_PID, once, when it
    is imported. A script has no such variable; Ray then takes the script's parent for the raylet, and counts it as exited
    where that is the init process, as in containers and services. The pid of the script itself has always a process.
    """
    if "ray" in sys.modules or "RAY_RAYLET_PID" in os.environ:
        yield
        return
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ["RAY_RAYLET_PID"]
