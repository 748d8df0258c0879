"""The coordinates of each rank of a worker group along dp, tp, pp and cp; pure functions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

Axis: TypeAlias = Literal["dp", "tp", "pp", "cp"]
AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "cp")
DEFAULT_MESH: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
"""Outermost axis first, as in torch's device meshes: tensor-parallel ranks are adjacent, pipeline
stages are far apart. Megatron's default order is the same.
"""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinates of one rank in its group."""

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
        """Return the coordinate along an axis."""
        coordinate: int = getattr(self, f"{axis}_rank")
        return coordinate

    def __str__(self) -> str:
        return " ".join(
            f"{axis}={self.along(axis)}/{getattr(self, f'{axis}_size')}" for axis in AXES
        )


class ParallelSizes:
    """The number of ranks along each axis and in total."""

    sizes: Mapping[Axis, int]

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


class Topology(ParallelSizes):
    """The coordinates of all ranks of a group.

    Args:
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        cp: Context-parallel ranks.
        mesh: The four axes, outermost first: ranks that differ only in the last one are adjacent.

    Raises:
        ValueError: A size is less than 1, or ``mesh`` does not name each axis once.
        TypeError: A size is not an integer.
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
        # Converted: NumPy integers would appear in messages and JSON.
        dp, tp, pp, cp = map(operator.index, (dp, tp, pp, cp))
        self.sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{axis}_size is {size}; expected 1 or more")
        if len(mesh) != len(AXES) or set(mesh) != set(AXES):
            raise ValueError(
                f"mesh is {mesh!r}; expected each of {', '.join(AXES)} once, outermost first"
            )
        self.mesh: tuple[Axis, ...] = tuple(mesh)
        sizes = {f"{axis}_size": size for axis, size in self.sizes.items()}
        ranks: list[RankInfo] = []
        for rank, position in enumerate(
            itertools.product(*(range(self.sizes[axis]) for axis in self.mesh))
        ):
            coordinates = {
                f"{axis}_rank": place for axis, place in zip(self.mesh, position, strict=True)
            }
            ranks.append(RankInfo(rank=rank, world_size=self.world_size, **coordinates, **sizes))
        self.ranks: Sequence[RankInfo] = tuple(ranks)
        """All ranks, in order."""

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
        """Create the topology of ``world_size`` ranks.

        Args:
            world_size: Number of ranks.
            dp: Data-parallel ranks; None: derived from the other sizes.
            tp: Tensor-parallel ranks.
            pp: Pipeline stages.
            cp: Context-parallel ranks.
            mesh: The four axes, outermost first.

        Returns:
            The topology.

        Raises:
            ValueError: The sizes do not multiply to ``world_size``.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected 1 or more")
        model = math.prod(max(1, size) for size in (tp, pp, cp))
        is_positive = min(tp, pp, cp, 1 if dp is None else dp) > 0  # Else the constructor raises.
        if is_positive and (world_size % model or dp not in (None, world_size // model)):
            given, factors = (
                ("", {max(1, world_size // model), -(-world_size // model)})
                if dp is None
                else (f"dp {dp} x ", {dp})
            )
            raise ValueError(
                f"world_size is {world_size}; {given}tp {tp} x pp {pp} x cp {cp} requires "
                f"{' or '.join(str(model * factor) for factor in sorted(factors))}"
            )
        return cls(dp=world_size // model if dp is None else dp, tp=tp, pp=pp, cp=cp, mesh=mesh)

    def get_rank_info(self, rank: int) -> RankInfo:
        """Return the coordinates of a rank.

        Raises:
            IndexError: The rank does not exist.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank is {rank}; expected 0 to {self.world_size - 1}")
        return self.ranks[rank]

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank at coordinates such as ``dp=1, tp=0``; unnamed axes are 0.

        Raises:
            ValueError: An axis is unknown.
            IndexError: A coordinate is out of range.
        """
        self._require_axes(coordinates)
        for axis, size in self.sizes.items():
            if not 0 <= coordinates.get(axis, 0) < size:
                raise IndexError(f"{axis} is {coordinates[axis]}; expected 0 to {size - 1}")
        rank = 0
        for axis in self.mesh:
            rank = rank * self.sizes[axis] + operator.index(coordinates.get(axis, 0))
        return rank

    def num_parts(self, axes: Sequence[Axis]) -> int:
        """Return the number of coordinates along these axes together.

        Raises:
            ValueError: An axis is unknown or repeated.
        """
        self._require_axes(axes)
        return math.prod(self.sizes[axis] for axis in axes)

    def part_of(self, rank: int, axes: Sequence[Axis]) -> int:
        """Return the index of a rank's coordinates along these axes together.

        Args:
            rank: The rank.
            axes: The axes, outermost first.

        Returns:
            An index below ``num_parts(axes)``.

        Raises:
            ValueError: An axis is unknown or repeated.
            IndexError: The rank does not exist.
        """
        self._require_axes(axes)
        info = self.get_rank_info(rank)
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + info.along(axis)
        return number

    def _require_axes(self, axes: Collection[str]) -> None:
        if len(set(axes)) < len(axes) or not set(axes) <= set(AXES):
            raise ValueError(
                f"axes are {', '.join(axes)}; expected some of {', '.join(AXES)}, each at most once"
            )

    def derivation(self, axes: Sequence[Axis]) -> str:
        """Explain the number of parts along these axes: 'dp = 20 ranks / (tp 2 x pp 2 x cp 1)'.

        Raises:
            ValueError: An axis is unknown or repeated.
        """
        self._require_axes(axes)
        others = " x ".join(
            f"{axis} {self.sizes[axis]}" for axis in ("tp", "pp", "cp", "dp") if axis not in axes
        )
        return f"{' x '.join(axes) or '1'} = {self.world_size} ranks" + (
            f" / ({others})" if others else ""
        )

    def table(self) -> str:
        """Format the ranks as one line each."""
        return "\n".join(f"{info.rank:>4}  {info}" for info in self.ranks)
