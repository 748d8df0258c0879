"""A worker's process title and log lines: start, engines, their states and weight versions, end."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from helmsman._process.recorder import Recorder
from helmsman._process.title import set_title
from helmsman._wire.messages import Request, WorkerConfig, WorkerIdentity
from helmsman.api.observer import Kind
from helmsman.api.scheduler import WorkerHealth
from helmsman.api.version import __version__

log = logging.getLogger("helmsman.worker")

FORMAT = "%(asctime)s helmsman: %(message)s"
_LIBRARIES = ("torch", "transformers", "vllm", "ray")
_STATES = {"sleep": "is asleep", "wake": "is awake"}
"""Log line after a successful method of an engine with weights."""
_VERSIONS = {
    "update_weights": "serves",
    "publish_weights": "has sent",
    "export_weights": "has exported",
    "load": "has loaded",
    "set_version": "has",
}
"""Verb of the log line about the engine's weight version after a method."""


def write_to_stderr() -> None:
    """Log to standard error, independent of the logging configuration of engines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class WorkerJournal:
    """Log lines and title of one worker.

    Args:
        identity: The worker.
        title_end: Appended to the titles of the process.
        recorder: Receives the lines and weight versions, too.
    """

    def __init__(self, identity: WorkerIdentity, title_end: str, recorder: Recorder) -> None:
        self._identity = identity
        self._recorder = recorder
        self._title_end = title_end
        self._libraries: dict[str, str] = {}
        """Library versions that were already logged."""
        self._has_noted_end = False

    def say(self, message: str, *arguments: object) -> None:
        log.info("%s " + message, self._identity.worker_id, *arguments)  # noqa: G003 - only constants are concatenated

    def started(self, config: WorkerConfig, pid: int) -> None:
        devices = (
            f"{config.grant.kind} {','.join(config.grant.ids)}"
            if config.grant and config.grant.ids
            else "none"
        )
        versions = {"helmsman": __version__, "python": sys.version.split()[0], **self._loaded()}
        self.say(
            "starts: pid %d, node %s, devices: %s, %s",
            pid,
            self._identity.node,
            devices,
            _listed(versions),
        )

    def created(self, name: str, engine: object) -> None:
        loaded = self._loaded()
        self.say(
            "engine %s is created: %s%s",
            name,
            type(engine).__qualname__,
            f", {_listed(loaded)}" if loaded else "",
        )

    def called(self, engine: Any, request: Request, result: object) -> None:
        """Log a line if a successful call has changed an engine's state or weights."""
        name, method = request.engine_name, request.method
        if not (method in _STATES or method in _VERSIONS) or not hasattr(engine, "get_version"):
            return
        if method in _STATES:
            self.say("engine %s %s", name, _STATES[method])
            self._recorder.note(Kind.STATE, self._recorder.name(f"{name} {_STATES[method]}"))
            return
        with contextlib.suppress(
            Exception
        ):  # of get_version, an engine's own code: the call itself has succeeded
            version = result if method == "update_weights" else engine.get_version()
            self.say("engine %s %s weight version %s", name, _VERSIONS[method], version)
            self._recorder.note(Kind.WEIGHTS, self._recorder.name(str(name)), int(str(version)))

    def beat(self, activity: WorkerHealth) -> WorkerHealth:
        """Show the running calls in the title, and log a SIGTERM, whose handler must not write.

        Called a few times a second; returns its argument.
        """
        running = [activity.running] if activity.running else []
        running += [
            name if count == 1 else f"{name} x{count}"
            for name, count in activity.async_running.items()
        ]
        calls = ", ".join(name.removeprefix(f"{activity.worker_id}.") for name in running)
        set_title(f"helmsman: {activity.worker_id} {calls or 'idle'}{self._title_end}")
        if activity.ends_in_s is not None and not self._has_noted_end:
            self._has_noted_end = True
            self.say("was sent SIGTERM, a preemption notice; it ends in %.0f s", activity.ends_in_s)
        return activity

    def _loaded(self) -> dict[str, str]:
        """Return versions of libraries loaded since the last line about them."""
        loaded = {
            name: str(getattr(sys.modules[name], "__version__", "?"))
            for name in _LIBRARIES
            if name in sys.modules
        }
        new = {
            name: version
            for name, version in loaded.items()
            if self._libraries.get(name) != version
        }
        self._libraries.update(new)
        return new


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
