"""Where jobs would go, or have gone: role -> instance -> bundles -> node and devices -> ranks; and
why one cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster at one moment."""

    node_id: str
    address: str
    hostname: str = ""
    accelerator: str = ""
    """Ray's resource of its accelerators, 'GPU' or 'NPU'; empty where it has none."""
    num_devices: int = 0
    num_free_devices: int = 0
    num_cpus: float = 0
    num_free_cpus: float = 0


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What is held for one replica."""

    node_id: str
    node: str
    """Address of the node."""
    devices: tuple[str, ...] = ()
    """Physical ids, in the order of the node."""
    bundles: tuple[int, ...] = ()
    """Of each of these devices, its bundle in the placement group."""
    placement_group: Any = None
    """Ray's; None where the scheduler has none."""


class PlannedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance takes of one node in one piece."""

    node_id: str
    node: str
    """Address of the node, for people."""
    resources: dict[str, float]
    """By Ray's names; memory in bytes."""
    devices: tuple[str, ...] = ()
    """Ids of its accelerators, in order. Expected ones in a plan; empty where it asks for some and
    others hold a part of the node, so that nobody can tell which are free."""


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: a rank of its role."""

    worker_id: str
    """'role/index', index being the rank."""
    node_id: str
    node: str
    bundle: int = 0
    """Index of its bundle in its instance."""
    num_devices: int = 0
    """Accelerators of its own node that it may use."""
    devices: tuple[str, ...] = ()
    """Their ids; empty as for a bundle."""
    num_ports: int = 0
    """Ports that it will lease on its node."""


class PlannedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One placement group: all workers of a shared job, or one worker of a separate or deferred
    one.
    """

    index: int
    bundles: tuple[PlannedBundle, ...]
    """In the order of nodes and devices; a shared instance has one for each worker, in rank
    order.
    """
    workers: tuple[PlannedWorker, ...]


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    role: str
    accelerator: str = ""
    """Ray's resource of its accelerators, 'GPU' or 'NPU'; empty where it asks for none."""
    target: str | None = None
    """Role whose nodes and devices it shares; its instances then have no bundles of their own."""
    instances: tuple[PlannedInstance, ...]

    @property
    def workers(self) -> list[PlannedWorker]:
        """All workers in rank order."""
        return [worker for instance in self.instances for worker in instance.workers]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A place for every rank of every role."""

    roles: tuple[PlannedRole, ...]

    def table(self) -> str:
        """A line for each instance, or for the ranks of a shared role on one node: role, ranks,
        node, devices, ports.
        """
        rows = [("role", "ranks", "node", "devices", "ports")]
        for role in self.roles:
            beside = f" (beside {role.target})" if role.target else ""
            for instance in role.instances:
                rows += [
                    (role.role + beside, *_row(role, instance, run)) for run in _runs(instance)
                ]
        return aligned(rows)


def _runs(instance: PlannedInstance) -> list[list[PlannedWorker]]:
    return [
        list(run) for _, run in itertools.groupby(instance.workers, lambda worker: worker.node_id)
    ]


def _row(
    role: PlannedRole, instance: PlannedInstance, run: list[PlannedWorker]
) -> tuple[str, str, str, str]:
    first, last = (run[index].worker_id.rpartition("/")[2] for index in (0, -1))
    ranks = first if len(run) == 1 else f"{first}-{last}"
    ports = sum(worker.num_ports for worker in run)
    if len(instance.bundles) > 1 and len(instance.workers) == 1:  # an instance that spans nodes
        devices = " + ".join(
            _ids(bundle.devices, bundle.resources.get(role.accelerator, 0))
            for bundle in instance.bundles
        )
        return ranks, " + ".join(bundle.node for bundle in instance.bundles), devices, _count(ports)
    ids = tuple(device for worker in run for device in worker.devices)
    return ranks, run[0].node, _ids(ids, sum(worker.num_devices for worker in run)), _count(ports)


def _ids(ids: tuple[str, ...], num_devices: float) -> str:
    """'0-3,6', or how many where nobody can tell which."""
    if not ids:
        return f"{num_devices:g} of those free" if num_devices else "-"
    if not all(map(str.isdecimal, ids)):
        return ",".join(ids)
    return ranges([int(device) for device in ids])


def ranges(numbers: Sequence[int]) -> str:
    """'0-3,6' for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _count(ports: int) -> str:
    return f"{ports}" if ports else "-"


ShortfallKind = Literal["selector", "bundle", "together", "pieces"]


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why jobs do not fit into what there is."""

    role: str
    """The role, or 'a and b' where jobs fit only without each other."""
    kind: ShortfallKind
    """selector: no node is allowed; bundle: one worker is larger than what any node has; together:
    all are more than there is; pieces: it would do in sum, but not as it lies."""
    requested: str
    observed: str
    best_node: str = ""
    """The best-fitting node, of a bundle."""
    missing: dict[str, float]
    """By Ray's names; memory in bytes."""
    missing_text: str
    change: str = ""
    """The smallest change that would fit, verified by planning with it; empty as long as nobody has
    looked for it.
    """

    def __str__(self) -> str:
        change = f" {self.change}." if self.change else ""
        return (
            f"{self.role}: requested {self.requested}; observed {self.observed}; short of "
            f"{self.missing_text}.{change}"
        )
