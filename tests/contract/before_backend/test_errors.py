"""Each mistake in a call raises an error of its own class, with the facts, and changes nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from helmsman._base.event_loop import run_sync
from helmsman.api import errors
from helmsman.api.scheduler import Call, Job, Scheduler, SchedulingSpec, SchedulingStrategy
from helmsman.controller._groups.call_all import call_all
from tests.contract.engines import Counter, Failing, Slow, Unloadable, Unreadable
from tests.contract.helpers import Engine, Gate, held, wait_until

ENGINES = "tests.contract.engines"
_names = (f"wrong-{number}" for number in itertools.count())


@pytest.fixture
def worker(shared_workers: list[str]) -> str:
    return shared_workers[0]


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("no_such_package.Engine", ["ModuleNotFoundError", "No module named 'no_such_package'"]),
        (f"{ENGINES}.NoSuchEngine", ["AttributeError", "NoSuchEngine"]),
        ("Engine", ["ImportError", "it has no module part"]),
        ("", ["ImportError", "it has no module part"]),
        ("broken_module.Engine", ["ZeroDivisionError", "broken_module.py", "line 2"]),
        ("exiting_module.Engine", ["SystemExit"]),
    ],
)
def test_create_engine_bad_import_path(
    scheduler: Scheduler,
    worker: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    facts: list[str],
) -> None:
    (tmp_path / "broken_module.py").write_text("answer = 42\n1 / 0\n")
    (tmp_path / "exiting_module.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = next(_names)
    with pytest.raises(errors.EngineImportError) as caught:
        Engine.create(scheduler, worker, path, name)
    assert caught.value.engine_path == path
    for fact in (worker, repr(path), *facts):
        assert fact in str(caught.value)
    assert Engine.create(scheduler, worker, Counter, name).call("add") == 1, "its name is free"


RAISED = pytest.mark.parametrize(
    ("kind", "unsent", "remote_type", "text"),  # unsent is for errors of methods
    [
        ("ValueError", "", "ValueError", "a bad value"),
        ("SystemExit", "", "SystemExit", "7"),
        ("KeyboardInterrupt", "", "KeyboardInterrupt", ""),
        ("WithLockError", "cannot be pickled", f"{ENGINES}.WithLockError", "it holds a lock"),
        ("TwoArgumentsError", "cannot be pickled", f"{ENGINES}.TwoArgumentsError", "one and two"),
        ("SilentError", "", f"{ENGINES}.SilentError", "no text: str() raised"),
        (
            "PlatformError with a lock",
            "cannot be pickled",
            "helmsman.api.errors.PlatformError",
            "no such device",
        ),
    ],
)


@RAISED
def test_create_engine_constructor_raises(
    scheduler: Scheduler, worker: str, kind: str, unsent: str, remote_type: str, text: str
) -> None:
    name = next(_names)
    with pytest.raises(errors.EngineCreationError) as caught:
        Engine.create(scheduler, worker, Failing, name, kind)
    error = caught.value
    assert (error.worker_id, error.engine_name) == (worker, name)
    assert error.remote_type == remote_type
    assert text in error.remote_message
    assert "raise make_error(kind)" in error.remote_traceback
    assert f"constructor of engine {name!r} raised {remote_type}" in str(error)
    assert "helmsman/rpc_server" not in error.remote_traceback, "frames of Helmsman are hidden"
    assert Engine.create(scheduler, worker, Counter, name).call("add") == 1, "its name is free"


def test_create_engine_wrong_arguments(scheduler: Scheduler, worker: str) -> None:
    with pytest.raises(
        errors.EngineCreationError, match="takes from 1 to 2 positional arguments but 4 were given"
    ):
        Engine.create(scheduler, worker, Counter, next(_names), 1, 2, 3)


def test_create_engine_by_class_path_or_callable(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    Engine.create(scheduler, worker, Counter, None, 3)
    assert scheduler.call_engine(worker, "add") == 4, "an engine is named after its worker"
    assert scheduler.call_engine(worker, "add", worker) == 5
    for name, engine in (
        ("dot", f"{ENGINES}.Counter"),
        ("colon", f"{ENGINES}:Counter"),
        ("partial", functools.partial(Counter, start=0)),
    ):
        assert Engine.create(scheduler, worker, engine, name).call("add") == 1


def test_create_engines_in_all_workers(
    scheduler: Scheduler, shared_workers: list[str], role: str
) -> None:
    """Workers are given as ids or Worker objects; the first error is raised after the last end."""
    scheduler.create_engines(scheduler.get_workers("shared"), Counter, role, 3)
    assert [scheduler.call_engine(each, "add", role, 2) for each in shared_workers] == [5, 5]
    asyncio.run(scheduler.async_create_engines(shared_workers[:1], Counter, f"{role}-x", 4))
    with pytest.raises(errors.EngineExistsError, match=f"{role}-x"):
        scheduler.create_engines(shared_workers, Counter, f"{role}-x", 4)
    assert scheduler.call_engine(shared_workers[1], "add", f"{role}-x", 1) == 5


def test_create_engine_name_under_construction(
    scheduler: Scheduler, worker: str, gate: Gate
) -> None:
    name = next(_names)

    async def create_twice() -> None:
        first = asyncio.ensure_future(scheduler.create_engine(worker, Slow, name, *gate.files))
        await asyncio.to_thread(gate.wait_started)
        with pytest.raises(errors.EngineExistsError, match="under construction"):
            await scheduler.create_engine(worker, Slow, name, *gate.files)
        gate.open()
        await first

    asyncio.run(create_twice())
    assert Engine(scheduler, worker, name).call("ready")


# --- methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("ehco", r"engine 'engine-\d+' \(a Counter\) .*Did you mean: echo"),
        ("zzzzzz", "method of Counter without a leading underscore"),
        *(
            (private, "it is private")
            for private in ("_secret", "__init__", "__reduce__", "__class__")
        ),
        ("log", "it is not callable"),
        ("broken", "it is a property"),
        ("broken_once", "it is a property"),
        ("", "has no public method ''"),
    ],
)
def test_call_engine_unknown_method(engine: Engine, method: str, reason: str) -> None:
    with pytest.raises(errors.MethodNotFoundError, match=reason):
        engine.call(method)
    assert engine.call("add") == 1


def test_call_engine_getattr_raises(scheduler: Scheduler, worker: str) -> None:
    unreadable = Engine.create(scheduler, worker, Unreadable, next(_names))
    with pytest.raises(errors.EngineCallError, match="RuntimeError: no attribute for you"):
        unreadable.call("anything")
    assert unreadable.call("known") == 1


@RAISED
@pytest.mark.parametrize("method", ["fail", "async_fail"])
def test_call_engine_method_raises(
    engine: Engine, method: str, kind: str, unsent: str, remote_type: str, text: str
) -> None:
    with pytest.raises(errors.EngineCallError) as caught:
        engine.call(method, kind)
    error = caught.value
    assert error.unsent == unsent
    assert (error.worker_id, error.engine_name, error.method) == (
        engine.worker_id,
        engine.name,
        method,
    )
    assert error.remote_type == remote_type
    assert text in error.remote_message
    assert "raise make_error(kind)" in error.remote_traceback
    assert f"{engine.name}.{method}" in str(error)
    if not unsent:
        assert type(error.__cause__).__name__ == remote_type.rpartition(".")[2]
    else:
        assert error.__cause__ is None
    assert pickle.loads(pickle.dumps(error)).remote_traceback == error.remote_traceback
    assert engine.call("add") == 1, "the worker is usable"


# --- arguments and results ------------------------------------------------------------------------


def test_argument_unpicklable(engine: Engine) -> None:
    lock = threading.Lock()
    with pytest.raises(errors.ArgumentNotSerializableError) as caught:
        engine.call("echo", 1, {"a": [0, lock]})
    assert caught.value.path == "args[1]['a'][1]"
    assert caught.value.value_type == "_thread.lock"
    assert "Nothing was sent" in str(caught.value)
    with pytest.raises(errors.ArgumentNotSerializableError) as by_name:
        engine.call("echo", option=lock)
    assert by_name.value.path == "kwargs['option']"
    with pytest.raises(errors.ArgumentNotSerializableError) as created:
        Engine.create(engine.scheduler, engine.worker_id, Counter, "never", lock)
    assert created.value.path == "args[0]"
    with pytest.raises(errors.ArgumentNotSerializableError):
        asyncio.run(engine.acall("echo", lock))
    assert engine.call("add") == 1


def test_argument_not_loadable(engine: Engine) -> None:
    for method in ("add", "async_add"):
        with pytest.raises(errors.ArgumentNotLoadableError) as caught:
            engine.call(method, Unloadable())
        assert "ValueError: refused to load" in caught.value.reason
        assert "The method did not run" in str(caught.value)
    with pytest.raises(errors.ArgumentNotLoadableError):
        Engine.create(engine.scheduler, engine.worker_id, Counter, "not-loaded", Unloadable())
    Engine.create(engine.scheduler, engine.worker_id, Counter, "not-loaded")
    assert engine.call("add") == 1, "neither method ran"


@pytest.mark.parametrize("method", ["unpicklable", "async_unpicklable"])
def test_result_unpicklable(engine: Engine, method: str) -> None:
    for meta in (None, {"keep": True}):
        with pytest.raises(errors.ResultNotSerializableError) as caught:
            engine.call(method, rpc_meta=meta)
        assert caught.value.path == "result['model'][1]['lock']"
        assert caught.value.value_type == "_thread.lock"
        assert "The call is not repeated" in str(caught.value)
    assert engine.call("add") == 1


def test_result_not_loadable(engine: Engine) -> None:
    with pytest.raises(errors.NotLoadableError, match="refused to load"):
        engine.call("apply", Unloadable)
    assert engine.call("add") == 1


def _raise_large(num_bytes: int) -> None:
    raise ValueError("x" * num_bytes)


def test_exception_message_truncated(engine: Engine) -> None:
    num_bytes = 8 << 20
    with pytest.raises(errors.EngineCallError) as caught:
        engine.call("apply", _raise_large, num_bytes)
    error, text = caught.value, str(caught.value)
    assert len(pickle.dumps(error)) < 512 << 10
    assert error.remote_type == "ValueError"
    assert error.remote_message.startswith("xxx")
    assert error.remote_message.endswith(f"(truncated: 65,536 of {num_bytes:,} characters)")
    assert "in _raise_large" in error.remote_traceback, "the frames are complete"
    assert error.__cause__ is None
    assert "when it is pickled, and 65,536 are sent at most, so __cause__ is not set" in text
    assert engine.call("add") == 1


@pytest.mark.parametrize("grace_s", [2.0, None], ids=["dependent-ranks", "independent-workers"])
def test_call_all_unserializable_argument(
    scheduler: Scheduler, shared_workers: list[str], role: str, grace_s: float | None
) -> None:
    """Ranks that wait for each other get no call, since they would hang in a collective."""
    first, second = shared_workers
    scheduler.create_engines(shared_workers, Counter, role)
    calls = {first: Call((1,)), second: Call((threading.Lock(),))}
    with pytest.raises(errors.GroupCallError, match="add failed on 1 of 2 ranks") as caught:
        run_sync(call_all(scheduler, "shared", "add", calls, engine_name=role, grace_s=grace_s))
    assert f"{second}: {role}.add: the argument args[0] (a _thread.lock) cannot be sent" in str(
        caught.value
    )
    assert "Nothing was sent" in str(caught.value)
    num_sent = 1 if grace_s is None else 0
    assert scheduler.call_engine(first, "add", role, 1) == num_sent + 1


def test_call_engine_missing_engine_name(engine: Engine) -> None:
    expected = (
        r"call_engine: the argument engine_name is 2 \(of type int\), expected str \| None\. "
        r"Nothing was sent\. .*"
        r'call_engine\(worker, "add", "counter", 2\)'
    )
    call: Any = engine.scheduler.call_engine
    with pytest.raises(TypeError, match=expected):
        call(engine.worker_id, "add", 2)
    with pytest.raises(TypeError, match=expected):
        asyncio.run(engine.scheduler.async_call_engine(engine.worker_id, "add", 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="call_many: the argument engine_name is 2 "):
        run_sync(
            call_all(engine.scheduler, "shared", "add", {engine.worker_id: Call()}, engine_name=2)  # type: ignore[arg-type]
        )
    with pytest.raises(TypeError, match=r'create_engine\(worker, engine, "counter", 2\)'):
        asyncio.run(engine.scheduler.create_engine(engine.worker_id, Counter, 2))  # type: ignore[arg-type]
    assert engine.call("add") == 1


class _Text(str):
    """A subclass of str, such as NumPy's."""


def test_names_of_str_subclass(engine: Engine) -> None:
    names = _Text(engine.worker_id), _Text("add"), _Text(engine.name)
    assert engine.scheduler.call_engine(*names, 2) == 2


def test_rpc_meta_wrong_types(engine: Engine) -> None:
    call: Any = engine.call
    for meta, named in (
        (5, "rpc_meta is 5"),
        ({"broadcast": "yes"}, r"rpc_meta\['broadcast'\] is 'yes'"),
        ({"keep": 1}, r"rpc_meta\['keep'\] is 1"),
        ({"kwargs": [1]}, r"rpc_meta\['kwargs'\] is \[1\]"),
        ({"kwargs": {1: 2}}, r"rpc_meta\['kwargs'\] is \{1: 2\}"),
        ({7: 2}, r"unknown rpc_meta \['7'\]"),
        ({"brodcast": True}, r"unknown rpc_meta \['brodcast'\]; it takes 'broadcast', 'discard'"),
    ):
        with pytest.raises(TypeError, match=named):
            call("add", rpc_meta=meta)
    assert engine.call("add") == 1


def test_set_worker_env_refuses_numbers(scheduler: Scheduler, worker: str) -> None:
    with pytest.raises(TypeError, match=f"environment of {worker}"):
        asyncio.run(scheduler.set_worker_env(worker, {"N": 1}))  # type: ignore[dict-item]


# --- jobs -----------------------------------------------------------------------------------------


def of(**fields: Any) -> Job:
    """Make a job of one worker with these fields of its spec."""
    return Job(role="r", tasks=[SchedulingSpec(**fields)])


def beside(target: str | None = None, replicas: int = 1, **fields: Any) -> Job:
    return Job(
        role="r", replicas=replicas, scheduling_strategy=SchedulingStrategy(target=target, **fields)
    )


SPECS = [SchedulingSpec(), SchedulingSpec(ray_placement_strategy="separate")]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(role="r", replicas=0), "job 'r': replicas is 0; expected 1 or more"),
        (Job(role="r", replicas=-2), "replicas is -2"),
        (
            Job(role="r", replicas=3, tasks=SPECS),
            "the number of tasks is 2; expected 1 spec, which all replicas share, or 3",
        ),
        (Job(role="r", tasks=[]), "the number of tasks is 0"),
        (of(cpu=-1), "job 'r': cpu is -1; expected 0 or more"),
        (of(gpu=-0.5), "gpu is -0.5"),
        (of(mem=-1), "mem is -1"),
        (of(port_count=-1), "port_count is -1"),
        (of(gpu=0.5), "gpu is 0.5; expected a whole number"),
        (of(cpu=float("nan")), "cpu is nan; expected 0 or more"),
        (of(gpu=float("inf")), "gpu is inf"),
        (of(resources={"x": -1}), "resources['x'] is -1"),
        (
            of(ray_placement_strategy="seperate"),
            "placement_strategy is 'seperate'; expected one of 'shared', 'separate', 'deferred'",
        ),
        (of(nodelist="gpu-1"), "tasks[0].nodelist is 'gpu-1'; expected array, got str"),
        (of(env_vars={"A": 1}), "tasks[0].env_vars['A'] is 1; expected a text"),
        (
            Job(role="r", replicas=2, tasks=SPECS),
            "is ['separate', 'shared']; expected the same for all tasks of a job",
        ),
        (Job(role=""), "role is ''"),
        (Job(role="a/b"), "role is 'a/b'"),
        (
            beside(type="colocation"),
            "scheduling_strategy.target is None; expected the role to colocate with",
        ),
        (beside(fork=True), "target and fork only with colocation"),
        (
            beside("shared", 3, type="colocation"),
            "replicas is 3; expected a divisor of the 2 workers of 'shared'",
        ),
        (beside("missing", type="colocation"), "no role 'missing'"),
        (beside("missing", type="colocation", fork=True), "no role 'missing'"),
    ],
)
def test_job_refuses_invalid_fields(
    scheduler: Scheduler, shared_workers: list[str], job: Job, message: str
) -> None:
    before = [status.worker_id for status in scheduler.status()]
    with pytest.raises(
        errors.RoleNotFoundError if "no role" in message else errors.InvalidSpecError
    ) as caught:
        scheduler.create_workers(job)
    assert message in str(caught.value)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(job.role or "r")
    assert [status.worker_id for status in scheduler.status()] == before


def test_errors_from_busy_worker(engine: Engine, gate: Gate) -> None:
    with held(engine, gate):
        for method in ("nothing_like_that", "_secret"):
            with pytest.raises(errors.MethodNotFoundError):
                engine.call(method, timeout=5)
        with pytest.raises(errors.EngineNotFoundError):
            engine.scheduler.call_engine(engine.worker_id, "add", "no-such-engine", rpc_timeout=5)
        with pytest.raises(errors.EngineExistsError):
            Engine.create(engine.scheduler, engine.worker_id, Counter, engine.name)
    wait_until(lambda: engine.call("add"), "the worker is usable")
