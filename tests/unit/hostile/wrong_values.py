"""Values of wrong types for every argument of the public methods."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from helmsman.api import errors, forms
from helmsman.api.faults import Kill
from helmsman.api.scheduler import Job, ResultHandle
from tests.contract.engines import Counter

WORKER = "w/0"
VALUES: Sequence[Any] = (
    *(None, True, 2, 2.5, 3j, "counter", b"counter", bytearray(3)),
    *([2], ("w/0",), {"a": 1}, {2}, [None], {2: 3}),
    *(int, len, object(), Ellipsis, Counter(), ValueError("a"), range(2)),
)
"""Values of many types; each argument accepts some of them."""

Accepts = Callable[[Any], bool]


def _is(*kinds: type[Any]) -> Accepts:
    return lambda value: (
        isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    )


def _or_none(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


def _items(accepts: Accepts) -> Accepts:
    return lambda value: isinstance(value, (list, tuple, range)) and all(map(accepts, value))


def _ids(value: Any) -> bool:
    # Strings and sets of ids are refused with other errors.
    return isinstance(value, (str, set)) or _items(_is(str))(value)


_TEXT, _COUNT, _NUMBER, _FLAG, _MAPPING = _is(str), _is(int), _is(int, float), _is(bool), _is(dict)
_SEQUENCE: Accepts = _is(list, tuple, range)


def _CODE(value: Any) -> bool:  # noqa: N802
    return isinstance(value, str) or callable(value)


def _NOTHING(value: Any) -> bool:  # noqa: N802
    return False


ACCEPTS: Mapping[str, Accepts] = {
    **dict.fromkeys(
        (
            "worker_id",
            "role",
            "target_role",
            "method",
            "cause",
            "address",
            "path",
            "holder",
            "next_step",
        ),
        _TEXT,
    ),
    **dict.fromkeys(("in_flight", "on_error"), _TEXT),
    **dict.fromkeys(
        ("engine_name", "command", "dtype", "checkpoint", "role of delete_workers"), _or_none(_TEXT)
    ),
    **dict.fromkeys(
        (
            "replicas",
            "count",
            "port",
            "rank",
            "device",
            "world_size",
            "version",
            "level",
            "num_samples",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("lr", "num_cpus"), _NUMBER),
    **dict.fromkeys(
        ("reverse_order", "elsewhere", "background", "migrate", "weights_only", "all_or_none"),
        _FLAG,
    ),
    **dict.fromkeys(("handle", "fault", "job", "jobs", "rollout"), _NOTHING),
    **dict.fromkeys(("sampling", "options", "resume_from"), _or_none(_NOTHING)),
    **dict.fromkeys(("env", "calls", "weights"), _MAPPING),
    **dict.fromkeys(("loss_kwargs", "rpc_meta"), _or_none(_MAPPING)),
    **dict.fromkeys(("engine", "loss_fn"), _CODE),
    **dict.fromkeys(("prompts", "prompt"), _SEQUENCE),
    # Items of text and bytes are refused as samples.
    "samples": _is(Sequence),  # type: ignore[type-abstract]
    "timeout": _or_none(_NUMBER),
    "rpc_timeout": _or_none(_NUMBER),
    "max_shard_bytes": _COUNT,
    "worker_ids": _ids,
    **dict.fromkeys(
        [f"worker_ids of {form}{name}" for form in ("", "async_") for name in ("sleep", "wake")],
        _or_none(_ids),
    ),
    "address of handle": _or_none(_TEXT),
    "devices": lambda value: isinstance(value, str) or _items(_COUNT)(value),
    "request_ids": _or_none(_ids),
    "device_mapping": lambda value: (
        value is None or isinstance(value, str) or _items(_COUNT)(value)
    ),
    "ranks": _items(_COUNT),
}
"""Predicates of valid values by the name of the argument. They repeat the annotations, so that the
tests find one that is too wide.
"""
UNCHECKED = {"value", "args", "kwargs", "self"}
"""Arguments that accept every value."""


def arguments_of(owner: type[Any]) -> list[tuple[str, str]]:
    """Return the name of each public method of a class with the name of each checked argument.

    An async form that forwards to its blocking form has no checks of its own.
    """
    return [
        (name, argument)
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and method.__code__.co_filename != forms.__file__
        for argument in inspect.signature(method).parameters
        if argument not in UNCHECKED
    ]


def wrong_values(method: str, argument: str) -> list[Any]:
    """Return the values that a method must refuse for an argument."""
    accepts = ACCEPTS.get(f"{argument} of {method}", ACCEPTS[argument])
    return [value for value in VALUES if not accepts(value)]


GOOD: Mapping[str, Any] = {
    **dict.fromkeys(("role", "target_role"), "w"),
    **dict.fromkeys(("replicas", "count", "world_size", "version", "num_samples"), 1),
    **dict.fromkeys(("device", "rank"), 0),
    **{name: {} for name in ("calls", "env", "weights")},
    **dict.fromkeys(("job", "jobs"), Job(role="other")),
    "worker_id": WORKER,
    "worker_ids": [WORKER],
    "method": "add",
    "engine_name": "counter",
    "cause": "was ended",
    "next_step": "",
    "address": "127.0.0.1",
    "port": 20000,
    "engine": Counter,
    "fault": Kill(WORKER, at_step=0),
    "handle": ResultHandle(id="x", worker_id=WORKER, location=b"", nbytes=0, summary=""),
    "path": "/nonexistent",
    "holder": "h",
    "ranks": [0],
    "devices": [0],
    "samples": [{"input_ids": [1]}],
    "loss_fn": "sft",
    "lr": 0.1,
    "prompts": [[1]],
    "prompt": [1],
}
"""Valid values of the arguments that have no default."""


def assert_refuses(
    method: Callable[..., Any], wrong: str, value: Any, good: Mapping[str, Any] = GOOD
) -> None:
    """Call a method with one argument of a wrong type, and check that the error names it."""
    arguments = {
        name: good[name]
        for name, each in inspect.signature(method).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }

    async def call() -> None:
        outcome = method(**{**arguments, wrong: value})
        if inspect.iscoroutine(outcome):
            await outcome

    with pytest.raises((TypeError, errors.HelmsmanError)) as caught:
        asyncio.run(call())
    message = str(caught.value)
    assert f"the argument {wrong} is" in message
    assert "expected" in message
    assert type(value).__qualname__ in message
