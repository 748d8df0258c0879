"""Workers in ROLL's style."""

from __future__ import annotations

from typing import Any

from helmsman.api.batch import Batch
from helmsman.compat.roll import Dispatch, Execute, RankInfo, Worker, register


class Rows:
    """Rows with ``chunk``, ``concat`` and metadata, as ROLL's DataProto has them."""

    def __init__(self, batch: list[int] | None = None, meta_info: Any = None) -> None:
        self.batch, self.meta_info = batch, meta_info

    def chunk(self, chunks: int) -> list[Rows]:
        rows = self.batch or []
        size = len(rows) // chunks
        return [Rows(rows[size * k : size * (k + 1)], self.meta_info) for k in range(chunks)]

    @staticmethod
    def concat(data: list[Rows]) -> Rows:
        return Rows([row for each in data for row in each.batch or []], data[0].meta_info)


class Counter(Worker):
    """Counts from its rank."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self.value = self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        self.value += x
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register()
    def own(self, x: Any, *, y: Any = None) -> Any:
        return self.rank, x, y

    @register(
        {
            "dispatch_fn": lambda cluster, x: (([x + k for k in range(cluster.world_size)],), {}),
            "collect_fn": lambda cluster, results: sum(results),
        }
    )
    def custom(self, x: int) -> int:
        return x

    def names(self) -> tuple[str, str, int, int]:
        return self.worker_name, self.cluster_name, self.world_size, self.get_free_port()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        self.rank_info = RankInfo(
            world_size=self.world_size,
            rank=self.rank,
            tp_size=self.world_size,
            tp_rank=self.rank,
        )


class Parallel(Worker):
    """2 tp x 2 pp, the rest dp; pipeline stages outermost."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config)
        tp, pp, dp = 2, 2, self.world_size // 4
        self.rank_info = RankInfo(
            world_size=self.world_size,
            rank=self.rank,
            tp_size=tp,
            pp_size=pp,
            dp_size=dp,
            tp_rank=self.rank % tp,
            dp_rank=self.rank % (dp * tp) // tp,
            pp_rank=self.rank // (dp * tp),
        )

    def _place(self) -> list[int]:
        info = self.rank_info
        return [info.dp_rank, info.tp_rank, info.pp_rank]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def add(self, x: list[int]) -> list[list[int]]:
        return [[*self._place(), row] for row in x]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def same(self, data: Any) -> Any:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    def given(self, data: Any) -> Any:
        if isinstance(data, Batch):
            return data.to_dict().get("x"), dict(data.meta)
        return data.batch, data.meta_info

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def number(self, x: list[int]) -> int:
        return len(x)


class Coroutines(Worker):
    """Its methods are coroutines."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def one_to_all(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    async def one_to_all_one(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    async def all_to_all(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    async def dp_mp_compute(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST)
    async def dp_mp_dispatch_first(self) -> int:
        return 1
