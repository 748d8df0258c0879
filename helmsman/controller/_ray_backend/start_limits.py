"""Limits of a start of an embedded Ray: Helmsman's instead of Ray's, and an error at once when a process has exited."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._ray_backend.process_watch import CORE
from helmsman.controller._transport.base import describe_exit, split_returncode

_LOOK_S = 1
"""Seconds that each of Ray's own waits may take; its processes are checked in between."""
_PAUSE_S = 0.05


class RayStart:
    """One attempt to start Ray.

    Ray waits 30 s for the port of its head and as long for the registration of its raylet, also where these have exited.

    Args:
        deadline: of the start.
    """

    SETTINGS: ClassVar[Mapping[str, Any]] = {"raylet_start_wait_time_s": _LOOK_S}
    """Ray's settings that this process needs during the start."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def blamed(self) -> str:
        """The process whose log has the reason of a failure: the first that has exited, else the last that was started."""
        exited = [name for name, process in self._started.items() if process.poll() is not None]
        return (exited or list(self._started)[::-1] or [CORE[0]])[0]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a ray.init of this thread waits as long as the deadline allows, and fails when a process has exited.

        It fails with a TimeoutError or a ChildProcessError. The waits of Ray are private to it; where they differ from the
        expected ones, Ray's own limits apply.
        """
        from ray._private import node, services

        parts: Any = services
        nodes: Any = node
        start, get_node = parts.start_ray_process, parts.get_node
        wait_for_port: Any = getattr(nodes, "wait_for_persisted_port", None)
        thread = threading.get_ident()

        def start_and_remember(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
            process = start(command, process_type, *args, **kwargs)
            if process_type in CORE and threading.get_ident() == thread:
                self._started[process_type] = process.process
            return process

        def get_registered_node(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return get_node(*args, **kwargs)
            return self._wait("raylet has not registered", lambda: get_node(*args, **kwargs))

        def wait_for_published_port(*args: Any, timeout_ms: int, **kwargs: Any) -> Any:
            assert wait_for_port is not None
            if threading.get_ident() != thread or not timeout_ms:
                return wait_for_port(*args, timeout_ms=timeout_ms, **kwargs)
            look = 1000 * _LOOK_S
            return self._wait("gcs_server has not published its port", lambda: wait_for_port(*args, timeout_ms=look, **kwargs))

        parts.start_ray_process, parts.get_node = start_and_remember, get_registered_node
        if wait_for_port is not None:
            nodes.wait_for_persisted_port = wait_for_published_port
        try:
            yield
        finally:
            parts.start_ray_process, parts.get_node = start, get_node
            if wait_for_port is not None:
                nodes.wait_for_persisted_port = wait_for_port

    def _wait(self, what: str, look: Callable[[], Any]) -> Any:
        while True:
            try:
                return look()
            except RuntimeError as error:
                self._require_alive()
                if self._deadline.passed:
                    raise TimeoutError(f"{what} within {self._deadline.limit_s:g} s (Timeouts.start_s)") from error
            time.sleep(_PAUSE_S)

    def _require_alive(self) -> None:
        for name, process in self._started.items():
            status = process.poll()
            if status is not None:
                raise ChildProcessError(f"{name} (pid {process.pid}) {describe_exit(*split_returncode(status))}")
