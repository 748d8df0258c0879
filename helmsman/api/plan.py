"""Where jobs would go, or have gone: role -> instance -> bundles -> node and devices -> ranks; and why one cannot."""

from __future__ import annotations

import msgspec


class PlannedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance takes of one node in one piece."""

    node_id: str
    node: str
    """Address of the node, for people."""
    resources: dict[str, float]
    """By Ray's names; memory in bytes."""
    devices: tuple[str, ...] = ()
    """Ids of its accelerators, in order. Expected ones in a plan; empty where it asks for some and others hold a part of the
    node, so that nobody can tell which are free."""


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
    """One placement group: all workers of a shared job, or one worker of a separate or deferred one."""

    index: int
    bundles: tuple[PlannedBundle, ...]
    """In the order of nodes and devices; a shared instance has one for each worker, in rank order."""
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


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why jobs cannot be placed."""

    role: str
    requested: str = ""
    best_node: str = ""
    observed: str = ""
    missing: dict[str, float] = {}
    change: str = ""
