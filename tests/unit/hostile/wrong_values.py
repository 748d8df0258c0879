"""Calls of public methods with a value of a wrong type, which each refuses by itself."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from helmsman import Job
from tests.contract.engines import Counter

WORKER = "w/0"
NAN = math.nan
Wrong = tuple[Callable[[Any], Any], type[Exception], str]
"""A call of an object, the class of its error, and a part of the message."""

OF_SCHEDULER: Sequence[Wrong] = (
    (lambda s: s.call_engine(5, "add"), TypeError, "the worker is 5 (of type int), expected its"),
    (lambda s: s.call_engine(WORKER, 5), TypeError, "the argument method is 5 (of type int)"),
    (lambda s: s.call_engine(WORKER, "add", 5), TypeError, "the argument engine_name is 5"),
    (lambda s: s.call_engine(WORKER, "add", rpc_meta=[1]), TypeError, "rpc_meta is [1]"),
    (lambda s: s.call_engine(WORKER, "add", rpc_timeout="1"), TypeError, "rpc_timeout is '1'"),
    (lambda s: s.call_engine(WORKER, "add", rpc_timeout=True), TypeError, "rpc_timeout is True"),
    (lambda s: s.call_engine(WORKER, "add", rpc_timeout=NAN), ValueError, "rpc_timeout=nan"),
    (lambda s: s.async_call_engine(WORKER, b"add"), TypeError, "the argument method is b'add'"),
    (lambda s: s.call_many({}, "add", timeout=NAN), ValueError, "call_many: timeout=nan"),
    (lambda s: s.create_engine(WORKER, Counter, 5), TypeError, "the argument engine_name is 5"),
    (lambda s: s.create_engines(WORKER, Counter), ValueError, "expected a sequence of ids"),
    (lambda s: s.create_engines([None], Counter), TypeError, "the worker is None"),
    (lambda s: s.create_workers("w"), TypeError, "create_workers: the argument job is 'w'"),
    (lambda s: s.create_workers([Job(role="x"), None]), TypeError, "the argument job is None"),
    (lambda s: s.plan({"role": "x"}), TypeError, "plan: the argument job is 'role'"),
    (lambda s: s.reserve(None), TypeError, "reserve: the argument job is None"),
    (lambda s: s.scale("w", True), TypeError, "scale: the argument replicas is True"),
    (lambda s: s.add_workers("w", 1.0), TypeError, "add_workers: the argument count is 1.0"),
    (lambda s: s.remove_workers("w", WORKER), ValueError, "expected a sequence of ids"),
    (lambda s: s.restart_worker(0), TypeError, "the worker is 0"),
    (lambda s: s.kill_worker(None, "drill"), TypeError, "the worker is None"),
    (lambda s: s.get_workers("w", NAN), ValueError, "get_workers: timeout=nan"),
    (lambda s: s.check_health(WORKER, "1"), TypeError, "check_health: the argument timeout is"),
    (lambda s: s.set_worker_env(WORKER, 5), TypeError, "int"),
    (lambda s: s.reporter.watch("raise"), TypeError, "watch: the argument policy is 'raise'"),
)


def assert_refuses(target: object, wrong: Wrong) -> None:
    """Make the call, and check its error."""
    call, error, text = wrong

    async def result() -> None:
        outcome = call(target)
        if inspect.iscoroutine(outcome):
            await outcome

    with pytest.raises(error, match=re.escape(text)):
        asyncio.run(result())
