"""Jobs and clusters in YAML or TOML files, for dry runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman.api.errors import JobsFileError
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.api.suggestions import did_you_mean
from helmsman.api.yaml_text import read_yaml
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState, Resources

T = TypeVar("T")


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
    return _load(path, "jobs", Job)


def load_cluster(path: str) -> ClusterSnapshot:
    """Read the nodes of a file.

    The file is a list, or has one under 'nodes', with the fields of NodeShape.

    Raises:
        JobsFileError: The file cannot be read or an entry is invalid; the error names the entry.
    """
    nodes: dict[str, NodeState] = {}
    for at, shape in enumerate(_load(path, "nodes", NodeShape)):
        where = f"nodes[{at}].name"
        for index in range(shape.count):
            try:
                name = shape.name.format(index=index)
            except (ValueError, LookupError) as error:
                raise JobsFileError(
                    path=path, where=where, reason=f"{shape.name!r}: {error}"
                ) from error
            if name in nodes:
                reason = f"{name!r} twice; names may contain {{index}}, and differ between entries"
                raise JobsFileError(path=path, where=where, reason=reason)
            nodes[name] = _node(name, shape)
    return ClusterSnapshot(nodes=tuple(nodes.values()))


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
            reason=f"expected the fields of a {kind.__name__}, got {value!r}",
        )
    for name, inner in value.items():
        if name not in kind.__struct_fields__:
            reason = (
                f"{kind.__name__} has no such field; "
                f"{did_you_mean(str(name), kind.__struct_fields__)}"
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
        text = Path(path).read_text()
        if path.endswith(".toml"):
            return tomllib.loads(text)
        return read_yaml(text)
    except ImportError as error:
        reason = "it is not installed; pip install pyyaml, or write the file in TOML"
        raise JobsFileError(path="a YAML file", where="PyYAML", reason=reason) from error
    except Exception as error:
        # The parsers' errors have no common base class that is available without PyYAML.
        raise JobsFileError(
            path=path, where="the file", reason=" ".join(str(error).split())
        ) from error
