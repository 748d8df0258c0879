"""Classes of the worker groups of the contract tests."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from helmsman.api.batch import Batch
from helmsman.api.dispatch import AxisSharding, Collect, Dispatch, Execute
from helmsman.api.register import register
from helmsman.api.worker_group import GroupWorker
from tests.contract.engines import wait_for_file  # type: ignore[attr-defined]


class Member(GroupWorker):
    """A worker whose methods have every mode of dispatch."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.first_rank = self.rank_info.rank
        self.num_steps = 0
        self.stored: Batch | None = None

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(Dispatch.ONE_TO_ALL)
    def rank_at_start(self) -> int:
        return self.first_rank

    @register(Dispatch.ONE_TO_ALL)
    async def aecho(self, value: Any) -> Any:
        return value

    @register(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> str:
        return str(self.rank_info)

    @register(Dispatch.ONE_TO_ALL_ONE)
    def rank_of_one(self) -> int:
        """Return the rank of the worker that answers."""
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def rank_of_zero(self) -> int:
        """Count the call; return the rank that runs it."""
        self.num_steps += 1
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL)
    def steps(self) -> int:
        return self.num_steps

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def add(self, batch: Batch, number: int = 0) -> Batch | None:
        """Return rows plus a number from the last pipeline stage, else None."""
        self.num_steps += 1
        if not self.rank_info.is_pipeline_last_stage:
            return None
        ranks = [self.rank_info.rank] * len(batch)
        return Batch(
            {"x": batch["x"] + number + self.offset, "rank": ranks},
            {"dp": self.rank_info.dp_rank, "same": True},
        )

    @register(Dispatch.DP_MP_COMPUTE, remainder="pad")
    def padded_add(self, batch: Batch) -> Any:
        return batch["x"] + 1

    @register(Dispatch.DP_MP_COMPUTE)
    def in_place(self, rows: Any) -> Any:
        rows += 1
        return rows

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def first_only(self, batch: Batch | None) -> Batch | None:
        """Store the batch; the last stage returns an empty one."""
        self.stored = batch
        return Batch({"x": np.zeros(0)}) if self.rank_info.is_pipeline_last_stage else None

    @register(AxisSharding(("dp",), (), meta_to_all=True), collect=sum)
    def meta_everywhere(self, batch: Batch) -> int:
        """Store the batch; return the number of its rows."""
        self.stored = batch
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def stored_rows_and_meta(self) -> tuple[int, dict[str, Any]]:
        assert self.stored is not None
        return len(self.stored), dict(self.stored.meta)

    @register(Dispatch.ONE_TO_ALL)
    def num_stored(self) -> int:
        """Return the number of stored rows; -1 for None."""
        return -1 if self.stored is None else len(self.stored)

    @register(Dispatch.DP_MP_COMPUTE, collect=Collect.LIST, remainder="uneven")
    def metrics(self, batch: Batch) -> dict[str, float]:
        return {"rows": len(batch), "rank": self.rank_info.rank}

    @register(Dispatch.DP_MP_COMPUTE, collect=sum)
    def summed(self, rows: list[int]) -> int:
        return sum(rows)

    @register(
        {
            "dispatch_fn": lambda topology, rows: ([rows], {}),
            "collect_fn": lambda topology, results: sum(results),
        }
    )
    def custom(self, number: int) -> int:
        return number

    @register(Dispatch.ALL_TO_ALL)
    def own(self, value: Any) -> Any:
        return self.rank_info.rank, value

    @register(AxisSharding(("tp", "dp"), ("pp",)))
    def over_two_axes(self, rows: list[int]) -> list[int]:
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, ranks: list[int], text: str) -> str:
        if self.rank_info.rank in ranks:
            raise ValueError(text)
        return "fine"

    @register(Dispatch.ONE_TO_ALL)
    def wait_on(self, ranks: list[int], release: str) -> int:
        """Create ``release.<rank>`` and wait for ``release`` on these ranks."""
        if self.rank_info.rank in ranks:
            Path(f"{release}.{self.rank_info.rank}").touch()
            wait_for_file(release)
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int, release: str) -> None:
        """End one rank; wait for a file on the others."""
        if self.rank_info.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_file(release)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.DP_MP_COMPUTE)
    def same(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.DP_MP_COMPUTE, remainder="uneven")
    def uneven(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def all_but_one_part(self, batch: Batch, instead: Any) -> Any:
        """Return the rows, but ``instead`` as the last part."""
        return instead if self.rank_info.dp_rank == self.rank_info.dp_size - 1 else batch

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def same_unless(self, batch: Batch, failing: int, late: int, release: str) -> Batch:
        """Return the rows; one part fails, and one waits for a file."""
        if self.rank_info.dp_rank == failing:
            raise ValueError("no")
        if self.rank_info.dp_rank == late:
            Path(f"{release}.began").touch()
            wait_for_file(release)
        return batch

    @register(Dispatch.DP_MP_COMPUTE, shard=())
    def make(self, num_rows: int) -> Batch:
        """Return a large batch of rows that are numbered across the dp ranks."""
        first = self.rank_info.dp_rank * num_rows
        return Batch(
            {"x": np.arange(first, first + num_rows), "payload": np.zeros((num_rows, 128))}
        )

    @register(Dispatch.DP_MP_COMPUTE)
    def rows_of(self, batch: Batch) -> list[tuple[int, int]]:
        return [(self.rank_info.rank, int(value)) for value in batch["x"]]

    @register(Dispatch.ONE_TO_ALL)
    def with_names_of_calls(
        self, *, timeout: float = 0, method: str = "", worker_id: int = 0
    ) -> tuple[Any, ...]:
        """Return its arguments, which are named like those of a scheduler's calls."""
        return timeout, method, worker_id

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class WithItsOwnView(Member):
    """A worker that reports its own view of its rank, which may be wrong."""

    def __init__(self, wrong_from: int = 1_000) -> None:
        super().__init__()
        self.wrong_from = wrong_from
        self.num_asked = 0

    def get_rank_info(self) -> Mapping[str, int]:
        self.num_asked += 1
        wrong = int(self.rank_info.rank >= self.wrong_from)
        return {"rank": self.rank_info.rank, "tp_rank": self.rank_info.tp_rank + wrong}

    @register(Dispatch.ONE_TO_ALL)
    def asked(self) -> int:
        return self.num_asked


@dataclasses.dataclass(frozen=True)
class Frozen(GroupWorker):
    """A worker whose attributes cannot be set."""

    number: int = 0

    def tell(self) -> tuple[int, int]:
        return self.number, self.rank_info.rank


class _Counting(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.number += 1
        return made


class WithAMetaclass(GroupWorker, metaclass=_Counting):
    """A worker whose metaclass changes new instances."""

    def __init__(self, number: int) -> None:
        self.number = number - 1

    tell = Frozen.tell


class AsRecord(GroupWorker, msgspec.Struct):
    """A worker that is a msgspec.Struct."""

    number: int

    tell = Frozen.tell


class Plain:
    """A class without base class and declared methods."""

    def __init__(self, *, text: str = "", engine: str = "") -> None:
        if text == "refuse":
            raise RuntimeError("this one does not start")
        self.text = text + engine

    def tell(self, *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.text, args, kwargs
