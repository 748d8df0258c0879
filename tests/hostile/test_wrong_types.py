"""Arguments of wrong types, for every public method: an error says so at once, nothing is sent, and
the worker goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.api import errors, forms
from helmsman.api.faults import Kill
from helmsman.api.scheduler import EngineSpec, Job, ResultHandle, Scheduler, Timeouts
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._schedulers.factory import make_scheduler
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weight_sync.sync import WeightSync
from helmsman.controller._worker_groups.cluster import Cluster
from helmsman.controller._worker_groups.resource_manager import ResourceManager
from tests.contract.engines import Counter
from tests.controller.engines import CountingRollout, RecordingTrainer

WORKER = "w/0"
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {},
    "local": {"num_gpus": 0, "accelerator": "cuda", "preload": ()},
}
"""Arguments are checked before a scheduler's own part begins, so these two stand for all."""
TIMEOUTS = Timeouts(start_s=60.0, create_engine_s=30.0, call_s=30.0, health_s=10.0)

VALUES: Sequence[Any] = (
    *(None, True, 2, 2.5, 3j, "counter", b"counter", bytearray(3)),
    *([2], ("w/0",), {"a": 1}, {2}, [None], {2: 3}),
    *(int, len, object(), Ellipsis, Counter(), ValueError("a"), range(2)),
)
"""Of each of them every argument takes those that are no values for it."""

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
    # letters and sets of ids are told of by other errors
    return isinstance(value, (str, set)) or _items(_is(str))(value)


_TEXT, _COUNT, _NUMBER, _FLAG, _MAPPING = _is(str), _is(int), _is(int, float), _is(bool), _is(dict)
_SEQUENCE: Accepts = _is(list, tuple, range)
# Beside its like
_CODE: Accepts = lambda value: isinstance(value, str) or callable(value)  # noqa: E731
_NOTHING: Accepts = lambda _: False  # noqa: E731
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
    **dict.fromkeys(("samples", "prompts", "prompt"), _SEQUENCE),
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
"""By name of an argument; said here once more, so that an annotation that is too wide is found."""
UNCHECKED = {"value", "args", "kwargs", "self"}
"""Anything goes: these arguments are the engine's, or are kept as they are."""


def _methods(owner: type[Any], own: type[Any]) -> list[tuple[str, str]]:
    """The public methods of a class, each once for each of its arguments.

    An awaited form that forwards to its blocking form has no checks of its own.
    """
    found = []
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        if name.startswith("_") or not hasattr(own, name):
            continue
        if method.__code__.co_filename != forms.__file__:
            found += [
                (name, each)
                for each in inspect.signature(method).parameters
                if each not in UNCHECKED
            ]
    return found


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
"""What the other arguments of a call are, where they have no default."""


def _call(
    method: Callable[..., Any], wrong: str, value: Any, good: Mapping[str, Any] = GOOD
) -> Any:
    """Call a method with one argument that is wrong; awaits what it gives."""
    arguments = {
        name: good[name]
        for name, each in inspect.signature(method).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    outcome = method(**{**arguments, wrong: value})
    if inspect.iscoroutine(outcome):

        async def awaited() -> Any:
            return await outcome

        return asyncio.run(awaited())
    return outcome


def _refuses(method: Callable[..., Any], argument: str, value: Any) -> None:
    with pytest.raises((TypeError, errors.HelmsmanError)) as caught:
        _call(method, argument, value)
    said = str(caught.value)
    assert method.__name__ in said or "call_engine" in said
    assert f"the argument {argument} is" in said
    assert "expected" in said
    assert type(value).__qualname__ in said


def _wrong_for(argument: str, method: str = "") -> st.SearchStrategy[Any]:
    accepts = ACCEPTS.get(f"{argument} of {method}", ACCEPTS[argument])
    return st.sampled_from([value for value in VALUES if not accepts(value)])


# --- schedulers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(OPTIONS))
def scheduler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scheduler]:
    """A scheduler with one worker, in which there is a Counter."""
    options = OPTIONS[request.param]
    with make_scheduler(
        request.param, log_dir=tmp_path_factory.mktemp("logs"), timeouts=TIMEOUTS, **options
    ) as made:
        made.create_workers(Job(role="w"))
        asyncio.run(made.create_engine(WORKER, Counter, "counter"))
        yield made


@pytest.mark.parametrize(("method", "argument"), _methods(Scheduler, Scheduler))
def test_scheduler_refuses_wrong_types(scheduler: Scheduler, method: str, argument: str) -> None:
    call: Any = scheduler.call_engine
    pid, before = call(WORKER, "pid", "counter"), call(WORKER, "add", "counter", 0)
    roles = [status.worker_id for status in scheduler.status()]

    @settings(max_examples=8, derandomize=True, database=None)
    @given(_wrong_for(argument, method))
    def refuses(value: Any) -> None:
        nonlocal before
        _refuses(getattr(scheduler, method), argument, value)
        before += 1
        assert call(WORKER, "add", "counter", 1, rpc_timeout=20.0) == before, "the sequence goes on"

    refuses()
    assert call(WORKER, "pid", "counter") == pid
    assert [status.worker_id for status in scheduler.status()] == roles


def test_scheduler_wrong_types_keep_call_order(scheduler: Scheduler) -> None:
    """Good calls are under way while others are refused, as in a script of many threads."""
    random_numbers = random.Random(0)
    choices = _methods(Scheduler, Scheduler)

    async def many() -> list[Any]:
        calls = []
        for _ in range(200):
            method, argument = random_numbers.choice(choices)
            accepts = ACCEPTS.get(f"{argument} of {method}", ACCEPTS[argument])
            value = random_numbers.choice([value for value in VALUES if not accepts(value)])
            await asyncio.to_thread(_refuses, getattr(scheduler, method), argument, value)
            calls.append(
                asyncio.ensure_future(
                    scheduler.async_call_engine(WORKER, "add", "counter", 1, rpc_timeout=20.0)
                )
            )
        return await asyncio.gather(*calls)

    first = scheduler.call_engine(WORKER, "add", "counter", 0)
    results = asyncio.run(many())
    assert sorted(results) == list(range(first + 1, first + 201))


# --- controllers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controllers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[type[Any], Any]]:
    """One of each, on workers in processes of their own."""
    options = {"log_dir": tmp_path_factory.mktemp("logs"), "timeouts": TIMEOUTS, **OPTIONS["local"]}
    with (
        make_scheduler("local", **options) as scheduler,
        ResourceManager(0, scheduler=scheduler) as resources,
        Cluster("group", Counter, resources, ClusterConfig(world_size=1)) as cluster,  # type: ignore[var-annotated]
        TrainController(scheduler, RecordingTrainer, Job(role="train")) as trainer,
        RolloutController(scheduler, CountingRollout, Job(role="rollout")) as rollout,
    ):
        trainer.initialize()
        rollout.initialize()
        made = (resources, cluster, trainer, rollout, WeightSync(trainer, rollout))
        yield {type(each): each for each in made}


CONTROLLERS = (TrainController, RolloutController, Cluster, ResourceManager, WeightSync)
NOT_OURS = {
    ("execute_all_async", "method"): "as execute_all_sync",
    **{
        (name, "method"): "WorkerGroup.method says it, with what to do"
        for name in (
            "execute_all_sync",
            "execute_rank_zero_sync",
            "execute_rank_zero_async",
            "method",
        )
    },
    ("keeps", "weights"): "it compares, and sends nothing",
}
"""Arguments whose errors are another's."""


@pytest.mark.parametrize(
    ("owner", "method", "argument"),
    [
        (owner, method, argument)
        for owner in CONTROLLERS
        for method, argument in _methods(owner, owner)
        if (method, argument) not in NOT_OURS
    ],
)
def test_controllers_refuse_wrong_types(
    controllers: Mapping[type[Any], Any], owner: type[Any], method: str, argument: str
) -> None:
    target, good = controllers[owner], {**GOOD, "rollout": controllers[RolloutController]}

    @settings(max_examples=6, derandomize=True, database=None)
    @given(_wrong_for(argument, method))
    def refuses(value: Any) -> None:
        with pytest.raises((TypeError, errors.HelmsmanError)) as caught:
            _call(getattr(target, method), argument, value, good)
        assert f"the argument {argument} is" in str(caught.value)

    refuses()
    assert controllers[TrainController].get_version() == 0
    assert controllers[Cluster].execute_all_sync("add", 0) == [0]


def test_create_engine_takes_engine_spec(scheduler: Scheduler) -> None:
    asyncio.run(
        scheduler.create_engine(WORKER, EngineSpec(target=Counter), f"spec-{random.random()}")
    )
