"""Optional packages, and the command that installs each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from helmsman.api.errors import BackendNotInstalledError

_PACKAGES = {
    "ray": ("ray", "cryptography"),
    "torch": ("torch", "transformers", "safetensors", "numpy"),
    "tensordict": ("tensordict",),
    "examples": ("rich", "matplotlib"),
    "server": ("aiohttp",),
    "agents": ("jinja2", "mcp"),
    "vllm": ("vllm",),
    "math": ("math_verify",),
    "data": ("datasets", "pyarrow"),
    "tracking": ("tensorboard", "wandb"),
    "metrics": ("prometheus_client",),
}
EXTRA_OF: Mapping[str, str] = {
    package: extra for extra, packages in _PACKAGES.items() for package in packages
}
"""Import name of a package -> the extra of Helmsman that installs it; matches pyproject.toml."""


def install_command(package: str) -> str:
    """Return the command that installs a package of EXTRA_OF."""
    return f"pip install 'helmsman-rl[{EXTRA_OF[package]}]'"


@contextlib.contextmanager
def needed_by(what: str, *packages: str) -> Iterator[None]:
    """Wrap a block that imports optional packages.

    Args:
        what: The feature that needs the packages, for the message.
        *packages: The packages; any of EXTRA_OF if none is given.

    Raises:
        BackendNotInstalledError: One of the packages is missing. Other errors pass through.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (packages or EXTRA_OF) or isinstance(error, BackendNotInstalledError):
            raise
        raise BackendNotInstalledError(
            backend=what, package=package, command=install_command(package)
        ) from error
