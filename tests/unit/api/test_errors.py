"""Test that every error names a next step, and survives pickling."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from helmsman.api import errors
from helmsman.api.errors import HelmsmanError

TRACEBACK = 'Traceback\n  File "engine.py", line 7, in step\nZeroDivisionError\n'
GIVEN: dict[str, Any] = {
    "worker_id": "train/1",
    "log_tail": "almost there\nlast words\n",
    "remote_traceback": TRACEBACK,
    "num_rows": 12,
    "divisor": 5,
    "differences": {f"train/{rank}": ("dp=0/2", "dp=1/2") for rank in range(19)},
    "failed": {"train/1": "No route to host", "train/2": "No route to host"},
    "refused": "",
    "aftermath": "",
    "pid": 4711,
    "port": 20001,
    "num_ranks": 64,
    "num_queued": 70,
    "num_recoveries": 30,
    "exit_code": errors.BootstrapExit.PREFLIGHT,
}
"""Values of fields by name; other values are made from the types of the fields."""

MADE: dict[str, Any] = {
    "float": 12.5,
    "bool": True,
    "bytes": b"x",
    "Sequence[int]": (8, 9),
    "dict[str, int]": {"a/1": 71},
}

HIDDEN = {
    *(
        "best_node",
        "exit_code",
        "exit_signal",
        "original",
        "may_have_begun",
        "worker_alive",
        "paused",
        "in_child",
    ),
    *("aftermath", "refused", "differences"),
    *(
        "EngineExistsError.method",
        "EngineImportError.method",
        "EngineImportError.engine_name",
        "EngineCreationError.method",
        *(
            f"{error}.{field}"
            for error in ("EngineCreationTimeoutError", "MethodNotFoundError")
            for field in (
                *("remote_type", "remote_message", "remote_traceback"),
                *("node", "unsent", "original", "log_path", "log_tail"),
            )
        ),
    ),
    *(
        "HandleLostError.engine_name",
        "HandleLostError.method",
        "JobsFileError.role",
        "LauncherError.said",
    ),
    *("RecoveryExhaustedError.loss", "RewardLostError.worker_id", "ServerLostError.engine"),
}
"""Fields for programs, and fields that messages show in other words."""

NEXT_STEPS = {
    "InvalidSpecError": "expected",
    "RoleExistsError": "Call delete_workers('a role') first",
    "RoleNotFoundError": "Create its workers with create_workers(job) first",
    "WorkerNotFoundError": "Ids are 'role/index'",
    "EngineNotFoundError": "Create it with create_engine first",
    "UnknownBackendError": "choose one of",
    "ClusterNotFoundError": "or use address='local' for an embedded one",
    "NodesMissingError": "Look at the log of the nodes that are not in this list, or lower "
    "num_nodes",
    "RayStartError": "or start a cluster with `ray start --head` and give its address",
    "ClusterLostError": "Close the scheduler and start another",
    "InstanceLostError": "RetryGeneration",
    "EngineDeadError": "SupervisionPolicy",
    "RequestDeadlineError": "Raise the deadline",
    "RequestsInFlightError": "end them with abort",
    "ServerLostError": "Give the rollout controller supervision",
    "FaultsUnsupportedError": "Run the drill on the 'local' or 'ray' scheduler",
    "EpisodeTimeoutError": "lower max_new_tokens",
    "WorkflowFailuresError": "Fix the workflow",
    "RewardTimeoutError": "Raise the limit if the function is only slow",
    "RewardLostError": "Score the item again if repeating the call is safe",
    "RewardWorkersSpentError": "or allow more restarts",
    "PlacementTimeoutError": "Wait for the holder",
    "WorkerStartError": "log: a log_path, last 2 lines:\n  | almost there\n  | last words",
    "CallTimeoutError": "Raise the limit",
    "EngineExistsError": "another engine_name",
    "EngineImportError": "a class can be passed instead",
    "EngineCreationError": "traceback in the worker",
    "EngineCallError": "traceback in the worker",
    "EngineCreationTimeoutError": "Raise the limit if the call is only slow",
    "MethodNotFoundError": "Did you mean: ",
    "ArgumentNotSerializableError": "build it inside the engine",
    "ArgumentNotLoadableError": "importable in the worker",
    "ResultNotSerializableError": "Return plain data",
    "PeerNotReadyError": "Look at the error of that rank first",
    "WorkerBacklogError": "Await earlier calls before making more",
    "HandleLostError": "Produce it again",
    "GroupCallError": "Root cause:",
    "RendezvousError": "no firewall blocks the ports",
    "CheckpointError": "Remove it to continue from the previous one",
    "DeviceMemoryError": "Reduce the memory of the largest role",
    "RecoveryExhaustedError": "start the script again to continue from a checkpoint",
    "UnevenBatchError": "declare remainder='pad'",
    "TopologyMismatchError": "Set the sizes and mesh of worker_config to those of the ranks' "
    "parallel groups",
    "SchedulerClosedError": "Make the call there",
    "LogDirectoryError": "Set log_dir to a writable directory",
    "UntrustedPathError": "XDG_STATE_HOME",
}
"""Advice of each error with fields, except ADVISED_BY_RAISER and errors with a field in ADVICE."""
ADVICE = {"step", "next_step", "change", "command"}

ADVISED_BY_RAISER = {"JobError", "JobsFileError", "NotFoundError", "StartError", "CallError"} | {
    *("BootstrapError", "PreflightError", "ClusterMismatchError"),
    # Callers convert them to a CallError.
    *(
        "CodecError",
        "NotSerializableError",
        "NotLoadableError",
    ),
}


def kinds_of_fields(cls: type[HelmsmanError]) -> dict[str, str]:
    kinds = {
        name: kind
        for base in reversed(cls.__mro__)
        for name, kind in vars(base).get("__annotations__", {}).items()
    }
    return {name: kinds[name].removesuffix(" | None") for name in cls.field_names}


def made(name: str, kind: str, number: int) -> Any:
    if name in GIVEN or kind in MADE:
        return GIVEN.get(name, MADE.get(kind))
    if kind == "int":
        return 7000 + number
    if kind in ("HelmsmanError", "WorkerFailedError"):
        return example(errors.WorkerFailedError)
    if kind == "dict[str, HelmsmanError]":
        return {
            "train/1": example(errors.WorkerFailedError),
            "train/0": example(errors.EngineCallError),
        }
    return (f"one of {name}", f"two of {name}") if kind == "Sequence[str]" else f"a {name}"


def example(cls: type[HelmsmanError], **fields: Any) -> Any:
    """Return an error of a class, with values for all of its fields."""
    if issubclass(cls, errors.BootstrapError) or not cls.field_names:
        return cls(
            "a message",
            **({"exit_code": errors.BootstrapExit.REFUSED} if cls is errors.BootstrapError else {}),
        )
    values = {
        name: made(name, kind, index)
        for index, (name, kind) in enumerate(kinds_of_fields(cls).items())
    }
    if cls in (errors.JobError, errors.StartError, errors.CallError):
        return cls("a message", **values)  # type: ignore[call-arg]
    return cls(**values | fields)


CLASSES: list[type[HelmsmanError]] = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, HelmsmanError)
]


def assert_same(restored: Any, error: HelmsmanError) -> None:
    assert type(restored) is type(error)
    assert str(restored) == str(error) != ""
    assert repr(restored) == repr(error)
    assert restored.args == error.args
    assert plain(restored) == plain(error)
    # ImportError keeps its message outside of __dict__.
    assert getattr(restored, "msg", None) == getattr(error, "msg", None)


def plain(value: Any) -> Any:
    """Convert nested errors to comparable data, since exceptions compare by identity."""
    if isinstance(value, HelmsmanError):
        return type(value), str(value), {key: plain(item) for key, item in vars(value).items()}
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def shown(value: Any) -> list[str]:
    """Return the texts by which a message shows a field."""
    if isinstance(value, HelmsmanError):
        return str(value).splitlines()[:1]
    if isinstance(value, dict):
        return [
            *list(value)[1:],
            *(str(each) for each in value.values() if isinstance(each, str | int)),
        ]
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return (
        ["12"] if isinstance(value, float) else [line.strip() for line in str(value).splitlines()]
    )


def test_errors_pickle_and_copy() -> None:
    for cls in CLASSES:
        error = example(cls)
        error.add_note("while the demo stopped")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert_same(pickle.loads(pickle.dumps(error, protocol)), error)
        for duplicate in (
            pickle.loads(cloudpickle.dumps(error)),
            copy.copy(error),
            copy.deepcopy(error),
        ):
            assert_same(duplicate, error)
            assert duplicate.__notes__ == ["while the demo stopped"]


def test_errors_messages_have_fields_and_next_step() -> None:
    for cls in CLASSES:
        error = example(cls)
        message = str(error)
        assert cls.__module__ == "helmsman.api.errors"
        assert not re.search("None|[{}]", message), message
        if not cls.field_names or message == "a message":
            continue
        assert NEXT_STEPS.get(cls.__name__, "") in message
        has_advice = cls.__name__ in NEXT_STEPS or bool(ADVICE & set(cls.field_names))
        assert has_advice != (cls.__name__ in ADVISED_BY_RAISER), cls
        for name in cls.field_names:
            if name not in HIDDEN and f"{cls.__name__}.{name}" not in HIDDEN:
                for text in shown(getattr(error, name)):
                    assert text in message, f"{cls.__name__}.{name}: {text!r} is not in {message!r}"


def test_errors_messages_follow_fields() -> None:
    failed, call = errors.WorkerFailedError, errors.EngineCallError
    for error, text in (
        (
            example(errors.WorkerNotFoundError, known=[f"train/{i}" for i in range(1000)]),
            "and 980 more",
        ),
        (example(errors.EngineNotFoundError, known=()), "it has: none."),
        (
            example(errors.NodesMissingError, present=()),
            "12.5 s (limit 12.5 s, Timeouts.start_s); present: none",
        ),
        (example(errors.SchedulerClosedError, in_child=False), "Make a new scheduler"),
        (
            example(errors.CallTimeoutError),
            "its engine thread is at:\n  | a stack\n  log: a log_path",
        ),
        (example(errors.CallTimeoutError, worker_alive=False), "The worker is not answering"),
        (
            example(failed),
            (
                "worker train/1 on node a node (pid 4711) a cause while a running ran (running for "
                "12.5 s)."
            ),
        ),
        (
            example(failed, pid=None, running=None),
            "(pid unknown) a cause. a engine_name.a method has no result",
        ),
        (
            example(failed, method="", next_step="", aftermath=""),
            "restart_worker('train/1') starts it again",
        ),
        (
            example(failed, aftermath="All were lost."),
            "was not sent again. All were lost.\n  log: a log_path, last 2 lines:\n",
        ),
        (
            example(call),
            (
                "train/1 on a node: a engine_name.a method (with an exception that a unsent, so "
                "__cause__ is not set)"
            ),
        ),
        (
            example(call, unsent="", node=""),
            "train/1: a engine_name.a method raised a remote_type: a remote_message",
        ),
        (
            example(call),
            (
                '\n  traceback in the worker:\n  | Traceback\n  |   File "engine.py", line 7, in '
                "step\n"
            ),
        ),
        (example(errors.EngineCreationError), "the constructor of engine 'a engine_name' raised"),
        (
            example(errors.MethodNotFoundError, suggestions=()),
            "Call a method of a engine_type without a leading underscore",
        ),
        (
            example(errors.GroupCallError),
            "2 of 64 ranks (1 other rank(s) failed as well: train/0). Root cause:\n  | ",
        ),
        (
            example(errors.RendezvousError),
            "2 of 4 ranks do not reach rank 0 (No route to host: train/1, train/2); reached",
        ),
        (
            example(errors.RendezvousError, refused="in use"),
            "rank 0 cannot listen on port 20001: in use. Source",
        ),
        (
            example(errors.UnevenBatchError),
            "over 5 parts: a derivation = 5; nearest valid sizes: 10 and 15.",
        ),
        (
            example(errors.UnevenBatchError, num_rows=3, derivation=""),
            "over 5 parts; nearest valid sizes: 5.",
        ),
        (example(errors.TopologyMismatchError), "\n  train/10  dp=0/2; worker: dp=1/2\n"),
        (example(errors.TopologyMismatchError), "\n  and 3 more"),
        (example(errors.InstanceLostError, may_have_begun=False), "had not begun the request"),
        (example(errors.RequestDeadlineError, instance=""), "it was a state."),
        (
            example(errors.RequestsInFlightError),
            "a/1 has 71. It is paused, and 70 are queued. Call wait_idle again",
        ),
        (
            example(errors.RequestsInFlightError, paused=False, in_flight={}),
            "none is in flight. 70 are queued. Wait again, or",
        ),
        (
            example(errors.ServerStartError),
            "\nlast lines of its output:\n  almost there\n  last words",
        ),
        (example(errors.ServerLostError, log_tail=""), "\nlast lines of its output:\n  (nothing)"),
        (example(errors.ServerRequestError, answer=" "), "response:\n  (nothing)"),
        (example(errors.RewardTimeoutError), "its engine thread was at:\n  | a stack"),
        (
            example(errors.RecoveryExhaustedError),
            "rank 1 (train/1 on node a node, pid 4711) a cause, after 30 recoveries",
        ),
        (
            example(errors.RecoveryExhaustedError, checkpoint=""),
            "start over, because there is no checkpoint.",
        ),
        (
            example(errors.ResourcesNotMetError, observed="node-a\nnode-b"),
            "observed:\n  node-a\n  node-b",
        ),
        (example(errors.DeviceMismatchError, granted=""), "granted no accelerator;"),
        (
            example(errors.RayStartError, processes=(), reason="No."),
            "started on this machine: No. Its",
        ),
        (
            errors.BootstrapError("it broke", exit_code=errors.BootstrapExit.RAY_DIED, log="boom"),
            "the end of its output:\nboom",
        ),
    ):
        assert text in str(error)


def test_errors_derived_fields() -> None:
    loss = example(errors.WorkerFailedError)
    assert (loss.role, loss.index) == ("train", 1)
    exhausted = example(errors.RecoveryExhaustedError)
    assert (exhausted.role, exhausted.rank, exhausted.log_path) == ("train", 1, "a log_path")
    assert example(errors.PlacementTimeoutError).state.startswith(
        "role 'a role', for 12 of at most 12 s: requested a requested;"
    )
    assert errors.signal_name(9) == "SIGKILL"
    assert errors.signal_name(99) == "signal 99"


def test_errors_unknown_fields() -> None:
    for wrong in ({}, {"role": "r", "num_workers": 2, "num_worker": 2}):
        with pytest.raises(TypeError, match="RoleExistsError: missing or unknown .*num_worker"):
            errors.RoleExistsError(**wrong)  # type: ignore[arg-type]


class UserError(errors.RoleExistsError):
    owner: str = "ada"
    template = "{owner}: {role}"


def test_errors_subclass_of_user() -> None:
    restored = pickle.loads(pickle.dumps(UserError(role="train", num_workers=0, owner="bob")))
    assert isinstance(restored, UserError)
    assert (restored.role, restored.owner, str(restored)) == ("train", "bob", "bob: train")
    assert UserError.__module__ == __name__


def test_bootstrap_exit_codes() -> None:
    assert all(2 < code < 126 for code in errors.BootstrapExit)
    assert errors.PreflightError("x").exit_code == 90
    assert errors.ClusterMismatchError("x").exit_code == 95


def test_errors_docstring_tree() -> None:
    drawn = {
        name: (parent, builtins) for name, parent, builtins in drawn_tree(errors.__doc__ or "")
    }
    assert drawn == {cls.__name__: real_place(cls) for cls in CLASSES if cls is not HelmsmanError}


def drawn_tree(text: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield name, parent and built-in bases of each line of the tree."""
    ancestors = ["HelmsmanError"]
    for prefix, name, builtins in re.findall(
        r"^([│ ]*[├└]── )(\w+)(?: \(([\w, ]+)\))?", text, re.MULTILINE
    ):
        depth = len(prefix) // 4
        del ancestors[depth:]
        yield name, ancestors[-1], frozenset(builtins.split(", ")) if builtins else frozenset()
        ancestors.append(name)


def real_place(cls: type[HelmsmanError]) -> tuple[str, frozenset[str]]:
    """Return the nearest public ancestor, and the built-in bases that the class itself adds.

    The tree leaves out private classes in between.
    """
    ours = [
        base
        for base in cls.__mro__[1:]
        if issubclass(base, HelmsmanError) and not base.__name__.startswith("_")
    ]
    builtins = {base.__name__ for base in cls.__bases__ if not issubclass(base, HelmsmanError)}
    return ours[0].__name__, frozenset(builtins)
