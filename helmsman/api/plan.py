"""Placement plans (role, instances, bundles, devices, ranks), and reasons why jobs do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a node of the cluster."""

    node_id: str
    address: str
    hostname: str = ""
    accelerator: str = ""
    """Ray resource name of its accelerators, 'GPU' or 'NPU'; empty if it has none."""
    num_devices: int = 0
    num_free_devices: int = 0
    num_cpus: float = 0
    num_free_cpus: float = 0


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The resources reserved for one replica."""

    node_id: str
    node: str
    """Address of the node."""
    devices: tuple[str, ...] = ()
    """Physical ids, in the node's order."""
    bundles: tuple[int, ...] = ()
    """Bundle index in the placement group, for each device."""
    placement_group: Any = None
    """Ray's placement group; None if the scheduler has none."""


class PlannedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of one bundle of an instance, all on one node."""

    node_id: str
    node: str
    """Address of the node, for messages."""
    resources: dict[str, float]
    """Amounts by Ray's resource names; memory in bytes."""
    devices: tuple[str, ...] = ()
    """Ids of its accelerators, in order; expected ids in a plan. Empty if other jobs hold part of
    the node, so that the free ids are unknown.
    """


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, which is a rank of its role."""

    worker_id: str
    """'role/index'; the index is the rank."""
    node_id: str
    node: str
    bundle: int = 0
    """Index of its bundle in its instance."""
    num_devices: int = 0
    """Number of accelerators that it may use on its own node."""
    devices: tuple[str, ...] = ()
    """Their ids; empty if unknown, as for PlannedBundle."""
    num_ports: int = 0
    """Number of ports to lease on its node."""


class PlannedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One placement group: all workers of a shared job, or one worker of another job."""

    index: int
    bundles: tuple[PlannedBundle, ...]
    """Ordered by node and device; a shared instance has one per worker, in rank order."""
    workers: tuple[PlannedWorker, ...]


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of one role."""

    role: str
    accelerator: str = ""
    """Ray resource name of its accelerators, 'GPU' or 'NPU'; empty if it requests none."""
    target: str | None = None
    """Role whose nodes and devices it shares; its instances then have no bundles of their own."""
    instances: tuple[PlannedInstance, ...]

    @property
    def workers(self) -> list[PlannedWorker]:
        """All workers in rank order."""
        return [worker for instance in self.instances for worker in instance.workers]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of every rank of every role."""

    roles: tuple[PlannedRole, ...]

    def table(self) -> str:
        """Format the plan as a table of role, ranks, node, devices and ports.

        It has one line per instance, or per node of a shared role.
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
    if len(instance.bundles) > 1 and len(instance.workers) == 1:  # The instance spans nodes.
        devices = " + ".join(
            _ids(bundle.devices, bundle.resources.get(role.accelerator, 0))
            for bundle in instance.bundles
        )
        return ranks, " + ".join(bundle.node for bundle in instance.bundles), devices, _count(ports)
    ids = tuple(device for worker in run for device in worker.devices)
    return ranks, run[0].node, _ids(ids, sum(worker.num_devices for worker in run)), _count(ports)


def _ids(ids: tuple[str, ...], num_devices: float) -> str:
    """Format device ids as '0-3,6', or their number if the ids are unknown."""
    if not ids:
        return f"{num_devices:g} of those free" if num_devices else "-"
    if not all(map(str.isdecimal, ids)):
        return ",".join(ids)
    return ranges([int(device) for device in ids])


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: '0-3,6' for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _count(ports: int) -> str:
    return f"{ports}" if ports else "-"


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why jobs do not fit."""

    role: str
    """The role, or 'a and b' if jobs fit only without each other."""
    kind: Literal["selector", "bundle", "together", "pieces"]
    """selector: no node is allowed; bundle: one worker needs more than any node has; together: the
    total exceeds the cluster; pieces: the total would fit, but is fragmented.
    """
    requested: str
    observed: str
    best_node: str = ""
    """The node that fits best, for kind 'bundle'."""
    missing: dict[str, float]
    """Amounts by Ray's resource names; memory in bytes."""
    missing_text: str
    change: str = ""
    """The smallest change that would fit, verified by planning with it; empty if not computed."""

    def __str__(self) -> str:
        change = f" {self.change}." if self.change else ""
        return (
            f"{self.role}: requested {self.requested}; observed {self.observed}; short of "
            f"{self.missing_text}.{change}"
        )
