"""Time limits for starting Ray, and early failure if one of its processes exits.

``python -m helmsman.controller._scheduler.ray.start_limits start ...`` runs ``ray start ...``
within these limits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from helmsman._base.event_loop import Deadline
from helmsman.controller._scheduler.transport.base import describe_exit, split_returncode
from helmsman.rpc_server._ray_forks.ray_patches import replaced

CORE = ("gcs_server", "raylet")
"""Processes without which Ray cannot run."""
LIMIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
"""Limit of ``ray start`` for each of them, in seconds; Ray itself reads it for the head."""

_LOOK_S = 1
"""Seconds that each of Ray's own waits may take; its processes are checked in between."""
_PAUSE_S = 0.05


class RayStart:
    """One attempt to start Ray before a deadline; errors name the setting ``limit_name``.

    Ray itself waits 30 s for the port of its head and 30 s for its raylet to register, even if
    these processes have exited.
    """

    SETTINGS: ClassVar[Mapping[str, Any]] = {"raylet_start_wait_time_s": _LOOK_S}
    """Ray settings that this process needs during the start."""

    def __init__(self, deadline: Deadline, limit_name: str = "Timeouts.start_s") -> None:
        self._deadline, self._limit_name = deadline, limit_name
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def blamed(self) -> str:
        """Process whose log explains a failure: the first that exited, else the last started."""
        exited = [name for name, process in self._started.items() if process.poll() is not None]
        return (exited or list(self._started)[::-1] or [CORE[0]])[0]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Bound a start of Ray in this thread by the deadline, and fail when a process exits.

        Within the context the start raises TimeoutError or ChildProcessError. This replaces private
        waits of Ray; in a version that lacks them, Ray's own limits apply.
        """
        from ray._private import node, services

        with (
            replaced(services, start_ray_process=self._start_process, get_node=self._get_node),
            replaced(node, wait_for_persisted_port=self._wait_for_port),
        ):
            yield

    def _start_process(
        self, start: Any, command: list[str], process_type: str, *args: Any, **kwargs: Any
    ) -> Any:
        process = start(command, process_type, *args, **kwargs)
        if process_type in CORE:
            self._started[process_type] = process.process
        return process

    def _get_node(self, get_node: Any, *args: Any, **kwargs: Any) -> Any:
        return self._wait("raylet has not registered", lambda: get_node(*args, **kwargs))

    def _wait_for_port(
        self, wait: Any, *args: Any, timeout_ms: float | None = None, **kwargs: Any
    ) -> Any:
        if timeout_ms == 0:
            return wait(*args, timeout_ms=timeout_ms, **kwargs)
        look_ms = 1000 * _LOOK_S
        return self._wait(
            "gcs_server has not published its port",
            lambda: wait(*args, timeout_ms=look_ms, **kwargs),
        )

    def _wait(self, what: str, look: Callable[[], Any]) -> Any:
        while True:
            try:
                return look()
            except RuntimeError as error:
                self._require_alive()
                if self._deadline.passed:
                    raise TimeoutError(
                        f"{what} within {self._deadline.limit_s:g} s ({self._limit_name})"
                    ) from error
            time.sleep(_PAUSE_S)

    def _require_alive(self) -> None:
        for name, process in self._started.items():
            status = process.poll()
            if status is not None:
                raise ChildProcessError(
                    f"{name} (pid {process.pid}) {describe_exit(*split_returncode(status))}"
                )


def main() -> None:
    """Run ``ray`` with this process's arguments, with LIMIT_VARIABLE as the limit of its start."""
    from ray.scripts import scripts

    with RayStart(Deadline(float(os.environ.get(LIMIT_VARIABLE, "30"))), LIMIT_VARIABLE).watching():
        scripts.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
