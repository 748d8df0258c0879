"""Patches of Ray's private functions; most apply to one thread, within a ``with`` block.

``replaced`` skips functions that the installed Ray lacks, so that Ray's own behaviour applies.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helmsman._process.environment import follow_thread_count
from helmsman.rpc_server._ray_forks import client

_COMMAND_OPTION = "--python_worker_command="


@contextlib.contextmanager
def replaced(module: Any, **replacements: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module for calls of this thread within the block.

    A replacement gets the original function as its first argument.
    """
    thread = threading.get_ident()

    def route(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        return call

    originals = {name: getattr(module, name) for name in replacements if hasattr(module, name)}
    for name, original in originals.items():
        setattr(module, name, route(original, replacements[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def through_client(command: Sequence[str], workers: Path) -> list[str] | None:
    """Return a raylet's command changed to start Python workers through our client.

    Args:
        command: The raylet's command.
        workers: Ray's folder of worker programs.

    Returns:
        The command; None if it has an unexpected form.
    """
    programs = [str(workers / "setup_worker.py"), str(workers / "default_worker.py")]
    expected = _COMMAND_OPTION + subprocess.list2cmdline([sys.executable, *programs]) + " "
    ours = (
        _COMMAND_OPTION
        + subprocess.list2cmdline([sys.executable, "-I", "-S", client.__file__, *programs])
        + " "
    )
    changed = [
        ours + word.removeprefix(expected) if word.startswith(expected) else word
        for word in command
    ]
    return changed if changed != list(command) else None


class _OutsideHelmsman:
    """A setting that is false in Helmsman's threads."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __bool__(self) -> bool:
        return self._value and not threading.current_thread().name.startswith("helmsman-")


def forbid_auto_start() -> None:
    """Keep Ray from starting a cluster implicitly in a thread of Helmsman.

    Many of Ray's calls start a cluster if the process is not connected to one. In Helmsman's
    threads this would be a late call, after its cluster has ended. The new cluster would end with
    the thread, and the next scheduler might join it before that.
    """
    from ray._private import auto_init_hook

    hook: Any = auto_init_hook
    setting = getattr(hook, "enable_auto_connect", None)
    if isinstance(setting, bool):
        hook.enable_auto_connect = _OutsideHelmsman(setting)


def only_core_processes() -> contextlib.AbstractContextManager[None]:
    """Start clusters of this thread without autoscaler, log monitor and API server.

    Each costs about a second of CPU time, and ray.init waits for the API server. An embedded
    cluster does not scale, our workers write their own logs, and without a dashboard the API server
    only reports usage statistics.
    """
    from ray._private.node import Node

    return replaced(
        Node, start_monitor=_do_nothing, start_log_monitor=_do_nothing, start_api_server=_do_nothing
    )


def _do_nothing(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> None:
    pass


def draws_class_ids_from_system(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the spec of ``ray.actor``, changed to draw the ids of actor classes from the system.

    Ray's library would draw them, for example when a preloaded module defines an actor, and forks
    would get the state of its generator: all their random ids would be the same. A worker ends if
    another has the id of its first object, and Ray starts the next one a minute later.
    """
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def execute_and_patch(module: Any) -> None:
        execute(module)
        if (kind := getattr(module, "ActorClassID", None)) is not None:
            module.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))

    spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
    return spec


def follow_omp_threads() -> None:
    """Make loaded libraries follow the number of threads that Ray sets for a task or an actor.

    Ray sets OMP_NUM_THREADS just before the first task runs. A worker that Ray starts itself loads
    the libraries after that; a forked one has them loaded already.
    """
    from ray._private import utils

    set_variable = utils.set_omp_num_threads_if_unset

    def set_and_follow() -> bool:
        has_set = set_variable()
        if has_set:
            follow_thread_count()
        return has_set

    utils.set_omp_num_threads_if_unset = set_and_follow
