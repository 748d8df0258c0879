"""Amounts of resources by Ray's names, and their text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from helmsman.api.platforms import PLATFORMS

Resources = dict[str, float]
"""By Ray's names ('CPU', 'GPU', 'NPU', 'memory' in bytes, custom ones)."""

ACCELERATORS = tuple(info.ray_resource for info in PLATFORMS.values() if info.visibility_env_var)
"""Ray's names of the accelerators that SchedulingSpec.gpu counts."""

_FIELDS = {**dict.fromkeys(ACCELERATORS, "gpu"), "CPU": "cpu", "memory": "mem"}


def total_of(parts: Iterable[Mapping[str, float]]) -> Resources:
    """Return the sum of resources by name."""
    total: Resources = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def missing_of(wanted: Mapping[str, float], available: Mapping[str, float]) -> Resources:
    """Return the part of the wanted resources that is not available."""
    short = {name: amount - available.get(name, 0.0) for name, amount in wanted.items()}
    return {name: by for name, by in short.items() if by > 1e-6}


def show(resources: Mapping[str, float]) -> str:
    """Return resources as text: '8 GPU, 64 CPU, 100 GB memory'."""
    order = sorted(resources, key=lambda name: (name not in ACCELERATORS, name == "memory"))
    return ", ".join(
        f"{_digits(resources[name] / 1e9)} GB memory" if name == "memory" else f"{resources[name]:.10g} {name}"
        for name in order
    )


def _digits(gigabytes: float) -> str:
    return f"{gigabytes:.4g}" if gigabytes < 1000 else f"{gigabytes:.0f}"


def field_of(resource: str) -> str:
    """Return the field of SchedulingSpec that requests a resource."""
    return f"SchedulingSpec.{_FIELDS.get(resource, 'resources')}"
