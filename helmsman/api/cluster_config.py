"""What a worker group is made of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from helmsman.api.errors import InvalidSpecError
from helmsman.api.suggestions import Suggesting
from helmsman.api.topology import DEFAULT_MESH, Axis, Topology


class ClusterConfig(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Size, devices and parallelism of a group's workers."""

    device_mapping: str | Sequence[int] | None = None
    """Devices of the ResourceManager by number, a list or '0-7,16'; ranks get them in this order. None: workers without
    devices, spread over the nodes."""
    num_gpus_per_worker: int = 1
    """Devices of each worker, where there is a device_mapping."""
    world_size: int | None = None
    """Number of workers; with a device_mapping what that gives."""
    num_cpus: float = 1
    """CPUs of each worker, from which thread counts follow. Workers without devices ask the cluster for them."""
    mem: float = 0
    """Memory of each worker without devices in GB (10^9 bytes)."""
    env_vars: dict[str, str] = {}
    """Environment variables of the workers."""
    max_concurrency: int | None = None
    """Calls of the group that may be in flight at once; further ones wait in the script, in their order. None: no limit."""
    dp_size: int | None = None
    """Data-parallel ranks; what the other sizes leave when None."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    pp_size: int = 1
    """Pipeline stages."""
    cp_size: int = 1
    """Context-parallel ranks."""
    mesh: Sequence[Axis] = DEFAULT_MESH
    """The axes, outermost first."""

    def topology(self, name: str, world_size: int) -> Topology:
        """The coordinates of so many ranks. Raises: InvalidSpecError, for the cluster called ``name``."""
        try:
            return Topology.of(world_size, dp=self.dp_size, tp=self.tp_size, pp=self.pp_size, cp=self.cp_size, mesh=self.mesh)
        except ValueError as error:
            sizes = f"dp {self.dp_size}, tp {self.tp_size}, pp {self.pp_size}, cp {self.cp_size}"
            raise InvalidSpecError(
                role=name, field="worker_config sizes", value=sizes, expected=f"sizes that make up the group: {error}"
            ) from error
