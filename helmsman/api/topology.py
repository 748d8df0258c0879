"""Where each rank of a worker group stands: its coordinates along data, tensor, pipeline and context parallelism. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

Axis: TypeAlias = Literal["dp", "tp", "pp", "cp"]
AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "cp")
DEFAULT_MESH: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
"""Outermost axis first, as torch's device meshes are described: tensor-parallel ranks are neighbours, pipeline stages are far
apart. Megatron's default order is the same."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place in its group."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int

    @property
    def is_pipeline_first_stage(self) -> bool:
        """Whether its pipeline stage is the first."""
        return self.pp_rank == 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        """Whether its pipeline stage is the last, which has the model's outputs."""
        return self.pp_rank == self.pp_size - 1

    def along(self, axis: Axis) -> int:
        """Its coordinate along an axis."""
        coordinate: int = getattr(self, f"{axis}_rank")
        return coordinate

    def __str__(self) -> str:
        return " ".join(f"{axis}={self.along(axis)}/{getattr(self, f'{axis}_size')}" for axis in AXES)


class Topology:
    """The coordinates of all ranks of a group.

    Args:
        dp, tp, pp, cp: ranks along each axis.
        mesh: the four axes, outermost first: ranks that differ in the last one only are neighbours.
    Raises: ValueError.
    """

    def __init__(
        self,
        *,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        mesh: Sequence[Axis] = DEFAULT_MESH,
    ) -> None:
        self.sizes: Mapping[Axis, int] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{axis}_size is {size}; it is 1 or more")
        if sorted(mesh) != sorted(AXES):
            raise ValueError(f"mesh is {list(mesh)}; it names each of {', '.join(AXES)} once, outermost first")
        self.mesh: tuple[Axis, ...] = tuple(mesh)
        self._ranks: list[RankInfo] = []
        self._at: dict[tuple[int, ...], int] = {}
        for rank, position in enumerate(itertools.product(*(range(self.sizes[axis]) for axis in self.mesh))):
            at: dict[str, int] = dict(zip(self.mesh, position, strict=True))
            self._ranks.append(
                RankInfo(
                    rank=rank,
                    world_size=self.world_size,
                    dp_rank=at["dp"],
                    dp_size=dp,
                    tp_rank=at["tp"],
                    tp_size=tp,
                    pp_rank=at["pp"],
                    pp_size=pp,
                    cp_rank=at["cp"],
                    cp_size=cp,
                )
            )
            self._at[tuple(at[axis] for axis in AXES)] = rank

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        mesh: Sequence[Axis] = DEFAULT_MESH,
    ) -> Topology:
        """The topology of so many ranks; ``dp`` is what tp, pp and cp leave when it is None.

        Raises: ValueError where the sizes do not make up the world.
        """
        model = math.prod(max(1, size) for size in (tp, pp, cp))  # the constructor tells of what is not positive
        if world_size % model or dp not in (None, world_size // model):
            given, factors = (
                ("", {max(1, world_size // model), -(-world_size // model)}) if dp is None else (f"dp {dp} x ", {dp})
            )
            raise ValueError(
                f"{given}tp {tp} x pp {pp} x cp {cp} does not make up a world of {world_size} ranks; it makes up "
                f"{' or '.join(str(model * factor) for factor in sorted(factors))}"
            )
        return cls(dp=world_size // model, tp=tp, pp=pp, cp=cp, mesh=mesh)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.sizes["dp"]

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.sizes["tp"]

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.sizes["pp"]

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return self.sizes["cp"]

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """All ranks, in order."""
        return self._ranks

    def get_rank_info(self, rank: int) -> RankInfo:
        """The coordinates of a rank. Raises: IndexError."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank}; there are ranks 0 to {self.world_size - 1}")
        return self._ranks[rank]

    def rank_at(self, **coordinates: int) -> int:
        """The rank at these coordinates, ``dp=1, tp=0``; 0 along axes that are not named."""
        return self._at[tuple(coordinates.get(axis, 0) for axis in AXES)]

    def num_parts(self, axes: Iterable[Axis]) -> int:
        """Number of coordinates along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def part_of(self, rank: int, axes: Sequence[Axis]) -> int:
        """The rank's number along these axes together, the first of them outermost."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self._ranks[rank].along(axis)
        return number

    def derivation(self, axes: Sequence[Axis]) -> str:
        """How the number of parts along these axes comes about: '5 = 20 ranks / (tp 2 x pp 2 x cp 1)' without the '5 ='."""
        others = " x ".join(f"{axis} {self.sizes[axis]}" for axis in ("tp", "pp", "cp", "dp") if axis not in axes)
        names = " x ".join(axes)
        return f"{names} = {self.world_size} ranks / ({others})" if others else f"{names} = {self.world_size} ranks"

    def table(self) -> str:
        """A line for each rank."""
        return "\n".join(f"{info.rank:>4}  {info}" for info in self._ranks)
