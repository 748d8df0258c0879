"""A worker's environment, and who set what in it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable

from helmsman.api.environment import EnvironmentVariable, masked
from helmsman.rpc_server._process.guardian import TAG_VARIABLE


class Environment:
    """The environment of this process; ``origin`` is the source of what it holds already."""

    def __init__(self, origin: str) -> None:
        sources = {TAG_VARIABLE: "helmsman"}
        self._known = {
            name: EnvironmentVariable(name, value, sources.get(name, origin))
            for name, value in dict(os.environ).items()
        }

    def set(self, variables: Iterable[EnvironmentVariable]) -> None:
        for variable in variables:
            os.environ[variable.name] = variable.value
            self._known[variable.name] = variable

    def describe(self) -> list[EnvironmentVariable]:
        """Every variable as it stands, sorted by name. Secrets are masked here, so that they never
        leave the process.
        """
        return [
            EnvironmentVariable(name, masked(name, value), self._source(name, value))
            for name, value in sorted(dict(os.environ).items())
        ]

    def _source(self, name: str, value: str) -> str:
        known = self._known.get(name)
        return known.source if known is not None and known.value == value else "engine"


def absolute_search_path() -> list[str]:
    return [os.path.abspath(folder) for folder in sys.path]


def extend_search_path(folders: Iterable[str]) -> None:
    """Search these folders, too, for modules; behind those of this process, so that a node's own
    packages win.
    """
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def preload(modules: Iterable[str]) -> None:
    """Import modules that workers are forked with; one that fails is left to the engine, which
    imports it again.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a module's own code may raise anything
            print(
                f"forkserver: {module} is not preloaded: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


def redirect_output(log: int) -> int:
    """Append the output of this process to an open file, whose descriptor is closed; returns how
    many bytes it had.
    """
    log_start = os.fstat(log).st_size
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return log_start


def follow_thread_count() -> None:
    """Let torch and numpy, where they are loaded, use as many threads as OMP_NUM_THREADS says: they
    have read it long before.

    To be called on the thread that computes, since OpenMP keeps the number for each.
    """
    # the others are of nested levels
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return
    torch = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(int(first))  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        for set_num_threads in _openblas_setters():
            set_num_threads(int(first))


@functools.cache
def _openblas_setters() -> list[Callable[[int], object]]:
    """What sets the number of threads of each OpenBLAS that this process has loaded; numpy's wheels
    bring one of their own.
    """
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split()[-1] for line in file if "openblas" in line}
    except OSError:
        return []
    libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    names = (
        "scipy_openblas_set_num_threads64_",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    )
    return [
        getattr(library, name) for library in libraries for name in names if hasattr(library, name)
    ]
