"""The description of a role: its workers, their resources and their placement."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from helmsman.api.environment import unfit
from helmsman.api.errors import InvalidSpecError
from helmsman.api.plain import make_plain
from helmsman.api.suggestions import Suggesting, did_you_mean

PlacementStrategy = Literal["shared", "separate", "deferred"]
NodePacking = Literal["pack", "spread", "strict_spread"]
_StrategyType = Literal["separation", "colocation"]

MAX_REPLICAS = 100_000
"""Maximum workers of a job; plans take memory and time for each."""
MAX_AMOUNT = 1e15
"""Maximum amount of a resource; the sums of larger ones are not exact."""


class SchedulingSpec(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """The resources and environment of one worker."""

    cpu: float = 1
    """CPU cores. Also the thread count (OMP_NUM_THREADS and similar, torch's), at least 1."""
    gpu: float = 0
    """Number of accelerators, of any kind that the cluster has."""
    mem: float = 0
    """Memory in GB (10^9 bytes); 0 requests no specific amount."""
    port_count: int = 0
    """Ports leased to the worker for its engine, below the ephemeral range or in
    HELMSMAN_PORT_RANGE ('20000-20200'). No other worker of any run on the node receives them until
    this worker ends. A worker with a ``cmd`` has at least one.
    """
    env_vars: dict[str, str] = {}
    """Environment variables of the worker; they override all forwarded variables."""
    cmd: str | None = None
    """Module and arguments to run (``python -m``) as a child process, which ends with the worker,
    and its own children with it. None: the worker runs engines only. Quoted as for a shell.
    ``{port0}``, ``{port1}``, ... are the worker's leased ports, ``{port}`` is the first;
    HELMSMAN_PORTS holds all. ``{index}`` is the worker's number in its role. The engine named
    'command' has its ``pid()`` and ``poll()``; ``check_health`` reports its end in
    ``failed_engines``.
    """
    cmd_ready: float | str | None = None
    """When the ``cmd`` has started, for which ``create_workers`` waits. Seconds: it has run for
    that time. Import path of a function: that, called in the worker with the list of its ports,
    returns True. None: the first port named in ``cmd`` accepts connections; a ``cmd`` that names
    none has run for 1 s.
    """
    ray_placement_strategy: PlacementStrategy = "shared"
    """shared: one placement group with a bundle per worker; separate: one group per worker;
    deferred: one group per instance, whose devices are left to processes that the worker starts: a
    server, or vLLM's ranks. It may span nodes.
    """
    resources: dict[str, float] = {}
    """Additional custom resources by name."""
    node_labels: dict[str, str] = {}
    """Labels that the worker's node must have. A value may also be '!x', 'in(x, y)' or '!in(x, y)',
    as in Ray's label selectors.
    """
    accelerator_type: str | None = None
    """Accelerator model that the worker's node must have, by Ray's name."""
    nodelist: Sequence[str] = ()
    """Addresses, host names or ids of the only nodes that may be used; empty allows all nodes."""
    exclude: Sequence[str] = ()
    """Addresses, host names or ids of nodes that must not be used."""
    node_packing: NodePacking = "pack"
    """pack: on as few nodes as possible, leaving whole nodes free; spread: over as many as
    possible; strict_spread: never two of the job's bundles on one node."""

    def __post_init__(self) -> None:
        """Convert the fields to plain Python."""
        make_plain(self)


class SchedulingStrategy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """The placement of a job's workers relative to another role."""

    type: _StrategyType = "separation"
    """separation: own resources; colocation: the resources of ``target``."""
    target: str | None = None
    """Role to colocate with."""
    fork: bool = False
    """With colocation: False reuses the target's workers, where the engine name distinguishes
    engines. True gives each worker a sibling process.
    """
    device_mapping: Sequence[Sequence[int]] = ()
    """With fork: for each replica, the devices of the target that it gets, on one node. Devices are
    numbered over the target's workers in rank order, and several replicas may share a device.
    Empty: divides the devices evenly between adjacent replicas.
    """

    def __post_init__(self) -> None:
        """Convert the fields to plain Python."""
        make_plain(self)


class Job(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """One role of the run: ``replicas`` workers with the specs ``tasks``."""

    role: str
    """Name of the role; workers are 'role/0', 'role/1', ..."""
    replicas: int = 1
    """Number of workers."""
    tasks: Sequence[SchedulingSpec] = (SchedulingSpec(),)
    """One spec for all replicas, or one for each. A mapping with the fields becomes a spec."""
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()
    """Whether the role has resources of its own or shares those of another role. A mapping with the
    fields becomes a strategy."""

    def __post_init__(self) -> None:
        """Convert the fields to plain Python, and mappings to specs and a strategy.

        Raises:
            InvalidSpecError: A mapping has an unknown key.
        """
        make_plain(self)
        if isinstance(self.tasks, list | tuple):
            tasks = [
                self._struct(SchedulingSpec, f"tasks[{index}]", each)
                for index, each in enumerate(self.tasks)
            ]
            msgspec.structs.force_setattr(self, "tasks", type(self.tasks)(tasks))
        name = "scheduling_strategy"
        strategy = self._struct(SchedulingStrategy, name, self.scheduling_strategy)
        msgspec.structs.force_setattr(self, name, strategy)

    def _struct(self, kind: type[msgspec.Struct], field: str, value: Any) -> Any:
        """Return the struct of a mapping, and any other value as it is."""
        if not isinstance(value, dict):
            return value
        known = kind.__struct_fields__
        for name in value:
            if name not in known:
                hint = did_you_mean(str(name), known)
                expected = f"a field of {kind.__name__}: {hint}"
                raise self._wrong(f"{field}.{name}", value[name], expected)
        return kind(**value)

    def validate(self) -> None:
        """Check the job's fields, independently of any cluster.

        Raises:
            InvalidSpecError: A field has an invalid type or value.
        """
        self._require_types()
        if not self.role or "/" in self.role or self.role != self.role.strip():
            raise self._wrong("role", self.role, "a name without '/' or blanks at its ends")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise self._wrong("replicas", self.replicas, f"1 or more, at most {MAX_REPLICAS:,}")
        if len(self.tasks) not in (1, self.replicas):
            expected = f"1 spec, which all replicas share, or {self.replicas}, one for each"
            raise self._wrong("the number of tasks", len(self.tasks), expected)
        for spec in self.tasks:
            amounts = {field: getattr(spec, field) for field in ("cpu", "gpu", "mem", "port_count")}
            amounts |= {f"resources[{name!r}]": amount for name, amount in spec.resources.items()}
            for field, amount in amounts.items():
                if not (0 <= amount <= MAX_AMOUNT):
                    raise self._wrong(field, amount, f"0 or more, at most {MAX_AMOUNT:g}")
            if isinstance(spec.cmd_ready, float | int) and not 0 <= spec.cmd_ready < math.inf:
                raise self._wrong("cmd_ready", spec.cmd_ready, "0 or more seconds")
            if spec.gpu != int(spec.gpu):
                raise self._wrong(
                    "gpu", spec.gpu, "a whole number; colocate roles to share a device"
                )
        for field in ("ray_placement_strategy", "node_packing"):
            values = sorted({getattr(spec, field) for spec in self.tasks})
            if len(values) > 1:
                raise self._wrong(field, values, "the same for all tasks of a job")
        strategy = self.scheduling_strategy
        if strategy.type == "colocation" and not strategy.target:
            raise self._wrong(
                "scheduling_strategy.target", strategy.target, "the role to colocate with"
            )
        if strategy.type == "separation" and (strategy.target or strategy.fork):
            raise self._wrong(
                "scheduling_strategy", strategy, "target and fork only with colocation"
            )
        if strategy.device_mapping:
            self._require_mapping(strategy)

    def _require_mapping(self, strategy: SchedulingStrategy) -> None:
        """Check device_mapping; ``colocation.tile`` compares it with the target's devices later."""
        field, mapping = "scheduling_strategy.device_mapping", strategy.device_mapping
        if not strategy.fork:
            raise self._wrong(field, mapping, "only with colocation and fork")
        if len(mapping) != self.replicas:
            raise self._wrong(field, mapping, f"an entry for each of the {self.replicas} replicas")
        for index, devices in enumerate(mapping):
            if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
                raise self._wrong(
                    f"{field}[{index}]", devices, "distinct device numbers, each 0 or more"
                )

    def _wrong(self, field: str, value: Any, expected: str) -> InvalidSpecError:
        return InvalidSpecError(role=str(self.role), field=field, value=value, expected=expected)

    def _require_types(self) -> None:
        """Check field types: msgspec does not check structs made in Python.

        Without this check, a misspelt strategy would be taken for another one.
        """
        self._require_environment()
        self._require_fields("", self)
        for index, spec in enumerate(self.tasks):
            self._require_fields(f"tasks[{index}].", spec)
        self._require_fields("scheduling_strategy.", self.scheduling_strategy)

    def _require_fields(self, prefix: str, struct: msgspec.Struct) -> None:
        entries = {name: getattr(struct, name) for name in struct.__struct_fields__}
        try:
            msgspec.convert(entries, type=type(struct))
        except msgspec.ValidationError as error:
            reason, _, where = str(error).partition(" - at `$.")
            field = f"{prefix}{where.rstrip('`')}"
            choices = _CHOICES.get(field.rpartition(".")[2])
            expected = (
                f"one of {', '.join(map(repr, choices))}"
                if choices
                else reason.removeprefix("Expected ").replace("`", "")
            )
            raise self._wrong(field, _at(self, field), expected) from error

    def _require_environment(self) -> None:
        """Check that a process can hold the variables."""
        for index, spec in enumerate(self.tasks if isinstance(self.tasks, list | tuple) else ()):
            variables = getattr(spec, "env_vars", None)
            for name, value in variables.items() if isinstance(variables, Mapping) else ():
                if found := unfit(name, value):
                    raise self._wrong(f"tasks[{index}].env_vars[{name!r}]", *found)

    def spec(self, index: int) -> SchedulingSpec:
        """Return the spec of replica ``index``."""
        return self.tasks[0] if len(self.tasks) == 1 else self.tasks[index]


_CHOICES = {
    "ray_placement_strategy": get_args(PlacementStrategy),
    "node_packing": get_args(NodePacking),
    "type": get_args(_StrategyType),
}


def _at(job: Job, path: str) -> Any:
    """Return the value at a path such as 'tasks[0].gpu', or the last value that exists on it."""
    value: Any = job
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        try:
            value = getattr(value, name) if name else value[int(index)]
        except (AttributeError, LookupError, TypeError):
            break
    return value
