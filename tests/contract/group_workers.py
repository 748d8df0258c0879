"""Classes of the worker groups of the contract tests."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from helmsman.api.batch import Batch
from helmsman.api.dispatch import AxisSharding, Collect, Dispatch, Execute
from helmsman.api.register import register
from helmsman.api.worker_group import GroupWorker
from tests.contract.engines import wait_for_file  # type: ignore[attr-defined]


class Member(GroupWorker):
    """Knows its place, and returns what was asked for."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.rank_at_birth = self.rank_info.rank
        self.num_steps = 0
        self.seen: Batch | None = None

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        """The value as it arrived."""
        return value

    @register(Dispatch.ONE_TO_ALL)
    def at_birth(self) -> int:
        """The rank that it had when its constructor ran."""
        return self.rank_at_birth

    @register(Dispatch.ONE_TO_ALL)
    async def aecho(self, value: Any) -> Any:
        """The same, as a coroutine."""
        return value

    @register(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> str:
        """Where it stands."""
        return str(self.rank_info)

    @register(Dispatch.ONE_TO_ALL_ONE)
    def rank_of_one(self) -> int:
        """The rank whose answer counts."""
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def rank_of_zero(self) -> int:
        """The rank that runs it."""
        self.num_steps += 1
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL)
    def steps(self) -> int:
        """How often something was counted here."""
        return self.num_steps

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def add(self, batch: Batch, number: int = 0) -> Batch | None:
        """Rows plus a number; nothing from pipeline stages before the last."""
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
        """Rows plus one, as an array; all shares are of one size."""
        return batch["x"] + 1

    @register(Dispatch.DP_MP_COMPUTE)
    def in_place(self, rows: Any) -> Any:
        """The same memory, one more in each place."""
        rows += 1
        return rows

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def first_only(self, batch: Batch | None) -> Batch | None:
        """Keeps what it got; the last stage answers with an empty batch."""
        self.seen = batch
        return Batch({"x": np.zeros(0)}) if self.rank_info.is_pipeline_last_stage else None

    @register(AxisSharding(("dp",), (), meta_to_all=True), collect=sum)
    def meta_everywhere(self, batch: Batch) -> int:
        """Keeps what it got, and returns the number of rows."""
        self.seen = batch
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def what_came_with_meta(self) -> tuple[int, dict[str, Any]]:
        """Rows and meta that meta_everywhere got."""
        assert self.seen is not None
        return len(self.seen), dict(self.seen.meta)

    @register(Dispatch.ONE_TO_ALL)
    def what_came(self) -> int:
        """Rows that first_only got; -1 for None."""
        return -1 if self.seen is None else len(self.seen)

    @register(Dispatch.DP_MP_COMPUTE, collect=Collect.LIST, remainder="uneven")
    def metrics(self, batch: Batch) -> dict[str, float]:
        """A number for each part."""
        return {"rows": len(batch), "rank": self.rank_info.rank}

    @register(Dispatch.DP_MP_COMPUTE, collect=sum)
    def summed(self, rows: list[int]) -> int:
        """The sum of a part."""
        return sum(rows)

    @register(
        {
            "dispatch_fn": lambda topology, rows: ([rows], {}),
            "collect_fn": lambda topology, results: sum(results),
        }
    )
    def custom(self, number: int) -> int:
        """The number."""
        return number

    @register(Dispatch.ALL_TO_ALL)
    def own(self, value: Any) -> Any:
        """What this rank alone was given."""
        return self.rank_info.rank, value

    @register(AxisSharding(("tp", "dp"), ("pp",)))
    def over_two_axes(self, rows: list[int]) -> list[int]:
        """Rows as they came."""
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, ranks: list[int], text: str) -> str:
        """Raises on these ranks."""
        if self.rank_info.rank in ranks:
            raise ValueError(text)
        return "fine"

    @register(Dispatch.ONE_TO_ALL)
    def wait_on(self, ranks: list[int], release: str) -> int:
        """Blocks on these ranks until the file is there."""
        if self.rank_info.rank in ranks:
            Path(f"{release}.{self.rank_info.rank}").touch()
            wait_for_file(release)
        return self.rank_info.rank

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int, release: str) -> None:
        """One rank ends at once; the others wait for a file."""
        if self.rank_info.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_file(release)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> dict[str, str | None]:
        """Variables of the process."""
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.DP_MP_COMPUTE)
    def same(self, batch: Batch) -> Batch:
        """The rows as they came."""
        return batch

    @register(Dispatch.DP_MP_COMPUTE, remainder="uneven")
    def uneven(self, batch: Batch) -> Batch:
        """The rows as they came, as many as there are."""
        return batch

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def all_but_one_part(self, batch: Batch, instead: Any) -> Any:
        """The rows as they came, and something else in place of the last part."""
        return instead if self.rank_info.dp_rank == self.rank_info.dp_size - 1 else batch

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def same_unless(self, batch: Batch, failing: int, late: int, release: str) -> Batch:
        """The rows as they came; one part fails, and one waits for a file."""
        if self.rank_info.dp_rank == failing:
            raise ValueError("no")
        if self.rank_info.dp_rank == late:
            Path(f"{release}.began").touch()
            wait_for_file(release)
        return batch

    @register(Dispatch.DP_MP_COMPUTE, shard=())
    def make(self, num_rows: int) -> Batch:
        """A large batch for each dp rank, told apart by the rank."""
        first = self.rank_info.dp_rank * num_rows
        return Batch(
            {"x": np.arange(first, first + num_rows), "payload": np.zeros((num_rows, 128))}
        )

    @register(Dispatch.DP_MP_COMPUTE)
    def rows_of(self, batch: Batch) -> list[tuple[int, int]]:
        """(rank, value) for each row."""
        return [(self.rank_info.rank, int(value)) for value in batch["x"]]

    @register(Dispatch.ONE_TO_ALL)
    def with_names_of_calls(
        self, *, timeout: float = 0, method: str = "", worker_id: int = 0
    ) -> tuple[Any, ...]:
        """Its arguments, which have the names that a scheduler's calls use themselves."""
        return timeout, method, worker_id

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def exit(self) -> NoReturn:
        """Ends the process in order."""
        sys.exit(3)


class WithItsOwnView(Member):
    """Says where it stands by itself, rightly or wrongly."""

    def __init__(self, wrong_from: int = 1_000) -> None:
        super().__init__()
        self.wrong_from = wrong_from
        self.num_asked = 0

    def get_rank_info(self) -> Mapping[str, int]:
        """Its own view."""
        self.num_asked += 1
        wrong = int(self.rank_info.rank >= self.wrong_from)
        return {"rank": self.rank_info.rank, "tp_rank": self.rank_info.tp_rank + wrong}

    @register(Dispatch.ONE_TO_ALL)
    def asked(self) -> int:
        """How often it was asked."""
        return self.num_asked


@dataclasses.dataclass(frozen=True)
class Frozen(GroupWorker):
    """Its attributes cannot be set."""

    number: int = 0

    def tell(self) -> tuple[int, int]:
        """What it was made with, and its rank."""
        return self.number, self.rank_info.rank


class _Counting(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.number += 1
        return made


class WithAMetaclass(GroupWorker, metaclass=_Counting):
    """Its metaclass has the last word on new instances."""

    def __init__(self, number: int) -> None:
        self.number = number - 1

    tell = Frozen.tell


class AsRecord(GroupWorker, msgspec.Struct):
    """Made by msgspec."""

    number: int

    tell = Frozen.tell


class Plain:
    """No base class, and nothing declared."""

    def __init__(self, *, text: str = "", engine: str = "") -> None:
        if text == "refuse":
            raise RuntimeError("this one does not start")
        self.text = text + engine

    def tell(self, *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """What arrived."""
        return self.text, args, kwargs
