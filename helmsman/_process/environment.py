"""A worker's environment and the sources of its variables, module search path, and output."""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable

from helmsman._base.interfaces import ipv4_interfaces
from helmsman._process.guardian import TAG_VARIABLE
from helmsman._process.upkeep import LogFile
from helmsman.api.environment import EnvironmentVariable, masked


class Environment:
    """The environment of this process.

    Args:
        origin: Source of the variables that it already has.
    """

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

    def set_interface(self, address: str) -> None:
        """Make gloo use the interface of this address, unless one has been chosen.

        By default gloo uses the address of the host name, which is loopback on Debian and Ubuntu.
        """
        for interface, own in ipv4_interfaces().items():
            if own == address:
                self.set(
                    EnvironmentVariable(name, interface, "helmsman")
                    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
                    if name not in os.environ
                )

    def describe(self) -> list[EnvironmentVariable]:
        """Return every current variable, sorted by name, with its source.

        Secrets are masked here, so that they never leave the process.
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
    """Append folders to the module search path, so that a node's own packages take precedence."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def preload(modules: Iterable[str]) -> None:
    """Import modules before workers are forked. An engine imports a failed module again itself."""
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
    """Append the output of this process to an open file, and close the file's descriptor.

    Returns:
        The previous size of the file in bytes.
    """
    log_start = os.fstat(log).st_size
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(LogFile(fd, closefd=False), line_buffering=True) for fd in (1, 2)
    )
    return log_start


def follow_thread_count() -> None:
    """Make loaded torch and numpy use OMP_NUM_THREADS threads, which they read only at import.

    Must be called on the thread that computes, since OpenMP keeps the number per thread.
    """
    # The numbers after a comma are for nested levels.
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
    """Return the thread-count setters of all loaded OpenBLAS libraries, such as numpy's own."""
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
