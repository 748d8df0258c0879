"""Jobs and clusters in YAML or TOML files, for dry runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman.api.config_files import read_config
from helmsman.api.errors import InvalidSpecError, JobsFileError
from helmsman.api.jobs import MAX_AMOUNT, MAX_REPLICAS
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.api.suggestions import did_you_mean
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState, Resources

T = TypeVar("T")
_MAX_JOBS = 64
_MAX_NODES = 100_000
_MAX_DEVICES = 1_000_000
_MAX_NAME = 253
"""Maximum characters of a node's name, as of a host name."""


class NodeShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of identical nodes."""

    count: int = 1
    name: str = "node-{index}"
    """Address of each node; {index} counts from 0 and accepts a format, e.g. 'gpu-{index:02}'."""
    cpu: float = 0
    gpu: int = 0
    npu: int = 0
    mem: float = 0
    """Memory in GB."""
    accelerator_type: str | None = None
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    free: dict[str, float] = {}
    """Free cpu, gpu, npu, mem (GB) and custom resources, for those that are partly in use."""


_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "tasks": SchedulingSpec,
    "scheduling_strategy": SchedulingStrategy,
}
_NAMES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU", "mem": "memory"}


def load_jobs(path: str) -> list[Job]:
    """Read the jobs of a file.

    The file is a list, or has one under 'jobs', with the fields of Job, SchedulingSpec and
    SchedulingStrategy.

    Raises:
        JobsFileError: The file cannot be read or an entry is invalid; the error names the entry.
    """
    jobs = _load(path, "jobs", Job)
    if len(jobs) > _MAX_JOBS:
        reason = f"{len(jobs):,} entries, expected at most {_MAX_JOBS}"
        raise JobsFileError(path=path, where="jobs", reason=reason)
    for index, job in enumerate(jobs):
        try:
            job.validate()
        except InvalidSpecError as error:
            reason = str(error).removesuffix(".")
            raise JobsFileError(path=path, where=f"jobs[{index}]", reason=reason) from error
    _require_few(path, "jobs", "replicas", [job.replicas for job in jobs], MAX_REPLICAS)
    return jobs


def load_cluster(path: str) -> ClusterSnapshot:
    """Read the nodes of a file.

    The file is a list, or has one under 'nodes', with the fields of NodeShape.

    Raises:
        JobsFileError: The file cannot be read or an entry is invalid; the error names the entry.
    """
    shapes = _load(path, "nodes", NodeShape)
    for at, shape in enumerate(shapes):
        _require_amounts(path, f"nodes[{at}]", shape)
    devices = [shape.count * (shape.gpu + shape.npu) for shape in shapes]
    _require_few(path, "nodes", "count", [shape.count for shape in shapes], _MAX_NODES)
    _require_few(path, "nodes", "devices (count times gpu and npu)", devices, _MAX_DEVICES)
    nodes: dict[str, NodeState] = {}
    for at, shape in enumerate(shapes):
        where = f"nodes[{at}].name"
        for index in range(shape.count):
            try:
                name = _name(shape.name, index)
            except (ValueError, LookupError) as error:
                raise JobsFileError(
                    path=path, where=where, reason=f"{shape.name!r:.80}: {error}"
                ) from error
            if name in nodes:
                reason = f"{name!r} twice; names may contain {{index}}, and differ between entries"
                raise JobsFileError(path=path, where=where, reason=reason)
            nodes[name] = _node(name, shape)
    return ClusterSnapshot(nodes=tuple(nodes.values()))


def _require_few(path: str, key: str, field: str, amounts: list[int], most: int) -> None:
    """Raise JobsFileError if the entries of a file have too many of something together."""
    if (total := sum(amounts)) > most:
        where = f"{key}[{amounts.index(max(amounts))}].{field}"
        reason = f"{max(amounts):,} here, {total:,} in the file, expected at most {most:,}"
        raise JobsFileError(path=path, where=where, reason=reason)


def _require_amounts(path: str, where: str, shape: NodeShape) -> None:
    amounts = {name: getattr(shape, name) for name in ("count", "cpu", "gpu", "npu", "mem")}
    for field in ("resources", "free"):
        amounts |= {f"{field}.{name}": each for name, each in getattr(shape, field).items()}
    for field, amount in amounts.items():
        if not 0 <= amount <= MAX_AMOUNT:
            reason = f"{amount!r}, expected 0 or more, at most {MAX_AMOUNT:g}"
            raise JobsFileError(path=path, where=f"{where}.{field}", reason=reason)


def _name(template: str, index: int) -> str:
    """Return the name of a node.

    Raises:
        ValueError: The template is invalid, or the name is too long.
        LookupError: The template has an unknown field.
    """
    if re.search(r"\d{4}[^{]*}", template):
        raise ValueError("the format has a width of more than 3 digits")
    name = template.format(index=index)
    if len(name) > _MAX_NAME:
        raise ValueError(f"the name has {len(name)} characters, expected at most {_MAX_NAME}")
    return name


def _node(name: str, shape: NodeShape) -> NodeState:
    amounts = {
        "cpu": shape.cpu,
        "gpu": float(shape.gpu),
        "npu": float(shape.npu),
        "mem": shape.mem,
        **shape.resources,
    }
    total = _by_ray({key: amount for key, amount in amounts.items() if amount})
    if shape.accelerator_type:
        total[f"accelerator_type:{shape.accelerator_type}"] = 1.0
    available = {**total, **_by_ray(shape.free)}
    return NodeState(
        node_id=name, address=name, total=total, available=available, labels=shape.labels
    )


def _by_ray(amounts: Mapping[str, float]) -> Resources:
    return {
        _NAMES.get(key, key): amount * (1e9 if key == "mem" else 1.0)
        for key, amount in amounts.items()
    }


def _load(path: str, key: str, kind: type[T]) -> list[T]:
    data = _parse(path)
    entries = data.get(key) if isinstance(data, Mapping) else data
    if not isinstance(entries, list):
        raise JobsFileError(
            path=path, where=key, reason=f"expected a list of {key}, or one under the key {key!r}"
        )
    for index, entry in enumerate(entries):
        _require_known(path, f"{key}[{index}]", entry, kind)
    try:
        return msgspec.convert(entries, type=list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        raise JobsFileError(path=path, where=key + at.rstrip("`"), reason=reason) from error


def _require_known(path: str, where: str, value: Any, kind: type[Any]) -> None:
    """Raise JobsFileError for an unknown field, nested or not, and suggest the nearest."""
    if not isinstance(value, Mapping):
        raise JobsFileError(
            path=path,
            where=where,
            reason=f"expected the fields of a {kind.__name__}, got {value!r:.80}",
        )
    for name, inner in value.items():
        if name not in kind.__struct_fields__:
            name = str(name)[:80]
            reason = (
                f"{kind.__name__} has no such field; {did_you_mean(name, kind.__struct_fields__)}"
            )
            raise JobsFileError(path=path, where=f"{where}.{name}", reason=reason)
        if kind is Job and name in _STRUCTS:
            listed = (
                {f"[{at}]": each for at, each in enumerate(inner)}
                if isinstance(inner, list)
                else {"": inner}
            )
            for at, each in listed.items():
                _require_known(path, f"{where}.{name}{at}", each, _STRUCTS[name])


def _parse(path: str) -> Any:
    try:
        return read_config(Path(path))
    except ModuleNotFoundError as error:
        reason = "it is not installed; pip install pyyaml, or write the file in TOML"
        raise JobsFileError(path="a YAML file", where="PyYAML", reason=reason) from error
    except (OSError, ValueError) as error:
        raise JobsFileError(path=path, where="the file", reason=str(error)) from error
