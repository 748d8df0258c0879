"""Test the functions of ROLL's modes of dispatch, and the mark of ``register``."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.compat import roll
from helmsman.compat.roll import Dispatch, RankInfo, register


def test_register_marks_method() -> None:
    @register()
    def process(a: int, b: int) -> int:
        return a + b

    declared = vars(process)["BIND_WORKER_METHOD_FLAG"]
    assert declared["dispatch_mode"] is Dispatch.ALL_TO_ALL
    assert process(1, 2) == 3
    register(Dispatch.ONE_TO_ALL, clear_cache=False, trace=True, prefetch=True)(process)
    assert vars(process)["BIND_WORKER_METHOD_FLAG"]["dispatch_mode"] is Dispatch.ONE_TO_ALL


class Ranks:
    """Four ranks as rules of dispatch see them: two data-parallel ones of two tensor-parallel."""

    world_size, dp_size = 4, 2

    def get_rank_info(self, rank: int) -> RankInfo:
        return RankInfo(4, tp_size=2, dp_size=2, rank=rank, tp_rank=rank % 2, dp_rank=rank // 2)


@pytest.mark.parametrize(
    ("rule", "given", "expected"),
    [
        (roll.dispatch_one_to_all, "ab", ["ab"] * 4),
        (roll.dispatch_all_to_all, [1, 2, 3, 4], [1, 2, 3, 4]),
        (roll.dispatch_dp_mp_compute, [1, 2, 3, 4], [[1, 2], [1, 2], [3, 4], [3, 4]]),
        (roll.dispatch_dp_mp_dispatch_first, [1, 2], [[1], [1], [2], [2]]),
    ],
)
def test_dispatch_functions_by_name(rule: Any, given: Any, expected: list[Any]) -> None:
    assert rule(Ranks(), given, key=given) == ((expected,), {"key": expected})


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (roll.collect_all_to_all, [[0], [1], [2], [3]]),
        (roll.collect_all_to_one, [0]),
        (roll.collect_dp_mp_compute, [0, 2]),
    ],
)
def test_collect_functions_by_name(rule: Any, expected: list[Any]) -> None:
    assert rule(Ranks(), [[0], [1], [2], [3]]) == expected
