"""Settings that Ray reads once, when it is imported."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator

from helmsman.api.extras import needed_by
from helmsman.rpc_server._ray_forks.ray_patches import forbid_auto_start


@contextlib.contextmanager
def importing_ray(user: str) -> Iterator[None]:
    """Import ray within it. Raises BackendNotInstalledError, which names the ``user`` of Ray.

    Authentication is explicit: without these variables, a local start writes a token file that changes the mode of this user's
    later clusters. An embedded cluster gets a token of its own, so that no other user can join it.

    The death of the raylet must not end this process. Ray ends a process whose raylet does not answer and has exited, and reads
    the raylet's pid from RAY_RAYLET_PID. A script has no such variable; Ray then takes the script's parent for the raylet, and
    counts it as exited where that is the init process, as in containers and services. The script's own pid always exists.
    """
    variables = {}
    if "ray" not in sys.modules:
        if os.environ.get("RAY_ADDRESS", "local") == "local" and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if "RAY_RAYLET_PID" not in os.environ:
            variables["RAY_RAYLET_PID"] = str(os.getpid())
    os.environ.update(variables)
    try:
        with needed_by(user, "ray"):
            yield
        forbid_auto_start()
    finally:
        for name in variables:
            del os.environ[name]
