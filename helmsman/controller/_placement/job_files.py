"""Jobs and clusters in YAML or TOML files, for plans on paper."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman.api.errors import JobsFileError
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.api.suggestions import did_you_mean
from helmsman.controller._placement.resources import Resources
from helmsman.controller._placement.snapshot import ClusterSnapshot, NodeState

T = TypeVar("T")


class NodeShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of nodes that are alike."""

    count: int = 1
    name: str = "node-{index}"
    """Address of each; {index} counts from 0 and takes a format, such as 'gpu-{index:02}'."""
    cpu: float = 0
    gpu: int = 0
    npu: int = 0
    mem: float = 0
    """GB."""
    accelerator_type: str | None = None
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    free: dict[str, float] = {}
    """What is free of cpu, gpu, npu, mem (GB) and custom resources, where that is less than all."""


_STRUCTS: dict[str, type[msgspec.Struct]] = {"tasks": SchedulingSpec, "scheduling_strategy": SchedulingStrategy}
_NAMES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU", "mem": "memory"}


def load_jobs(path: str) -> list[Job]:
    """The jobs of a file: a list, or one under 'jobs', with the fields of Job, SchedulingSpec and SchedulingStrategy.

    Raises: JobsFileError.
    """
    entries = _entries(path, "jobs")
    for index, entry in enumerate(entries):
        _require_known(path, f"jobs[{index}]", entry, Job)
        for field, kind in _STRUCTS.items():
            values = entry.get(field, []) if isinstance(entry, Mapping) else []
            for at, value in enumerate(values if isinstance(values, list) else [values]):
                where = f"jobs[{index}].{field}" + (f"[{at}]" if isinstance(values, list) else "")
                _require_known(path, where, value, kind)
    return _convert(path, "jobs", entries, list[Job])


def load_cluster(path: str) -> ClusterSnapshot:
    """The nodes of a file: a list, or one under 'nodes', of NodeShape.

    Raises: JobsFileError.
    """
    entries = _entries(path, "nodes")
    for index, entry in enumerate(entries):
        _require_known(path, f"nodes[{index}]", entry, NodeShape)
    shapes = _convert(path, "nodes", entries, list[NodeShape])
    nodes: dict[str, NodeState] = {}
    for at, shape in enumerate(shapes):
        for index in range(shape.count):
            try:
                name = shape.name.format(index=index)
            except (ValueError, LookupError) as error:
                raise JobsFileError(path=path, where=f"nodes[{at}].name", reason=f"{shape.name!r}: {error}") from error
            if name in nodes:
                reason = f"{name!r} twice; names may contain {{index}}, and differ between entries"
                raise JobsFileError(path=path, where=f"nodes[{at}].name", reason=reason)
            nodes[name] = _node(name, shape)
    return ClusterSnapshot(nodes=tuple(nodes.values()))


def _node(name: str, shape: NodeShape) -> NodeState:
    amounts = {"cpu": shape.cpu, "gpu": float(shape.gpu), "npu": float(shape.npu), "mem": shape.mem, **shape.resources}
    total = _by_ray({key: amount for key, amount in amounts.items() if amount})
    if shape.accelerator_type:
        total[f"accelerator_type:{shape.accelerator_type}"] = 1.0
    available = {**total, **_by_ray(shape.free)}
    return NodeState(node_id=name, address=name, total=total, available=available, labels=shape.labels)


def _by_ray(amounts: Mapping[str, float]) -> Resources:
    return {_NAMES.get(key, key): amount * (1e9 if key == "mem" else 1.0) for key, amount in amounts.items()}


def _entries(path: str, key: str) -> list[Any]:
    data = _parse(path)
    if isinstance(data, Mapping):
        data = data.get(key)
    if not isinstance(data, list):
        raise JobsFileError(path=path, where=key, reason=f"expected a list of {key}, or one under the key {key!r}")
    return data


def _parse(path: str) -> Any:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise JobsFileError(path=path, where="the file", reason=str(error)) from error
    try:
        if path.endswith(".toml"):
            return tomllib.loads(text)
        return _yaml().safe_load(text)
    except JobsFileError:
        raise
    except Exception as error:  # the parsers' errors have no common base that can be named without importing PyYAML
        raise JobsFileError(path=path, where="the file", reason=" ".join(str(error).split())) from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise JobsFileError(
            path="a YAML file", where="PyYAML", reason="it is not installed; pip install pyyaml, or write the file in TOML"
        ) from error
    return yaml


def _require_known(path: str, where: str, value: Any, kind: type[msgspec.Struct]) -> None:
    if not isinstance(value, Mapping):
        raise JobsFileError(path=path, where=where, reason=f"expected the fields of a {kind.__name__}, got {value!r}")
    for name in value:
        if name not in kind.__struct_fields__:
            reason = f"{kind.__name__} has no such field; {did_you_mean(str(name), kind.__struct_fields__)}"
            raise JobsFileError(path=path, where=f"{where}.{name}", reason=reason)


def _convert(path: str, key: str, entries: Sequence[Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(entries, type=kind)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        raise JobsFileError(path=path, where=key + at.rstrip("`"), reason=reason) from error
