"""Generates the error catalogue and the settings tables of the documentation from the sources.

``python docs/_site/pages.py`` rewrites them; tests/docs/test_generated.py fails while they are out
of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from helmsman.api import errors  # noqa: E402 - found by the line above, also without an installation
from helmsman.api.errors import HelmsmanError  # noqa: E402

COMMAND = "python docs/_site/pages.py"

# --- errors ---------------------------------------------------------------------------------------

CAUSES: dict[str, tuple[str, str]] = {
    "InvalidSpecError": (
        "A misspelt or impossible field of `Job` or `SchedulingSpec`.",
        "Set the field as the message says.",
    ),
    "JobsFileError": (
        "A syntax error or unknown key in a file for `helmsman plan`.",
        "Correct the place that is named.",
    ),
    "RoleExistsError": (
        "`create_workers` ran twice for a role.",
        "Delete the role first, or choose another name.",
    ),
    "RoleNotFoundError": (
        "A typing error, or the role has been deleted.",
        "Use one of the names in the message.",
    ),
    "WorkerNotFoundError": (
        "An id of a worker that was removed.",
        "Use an id that `create_workers` returned.",
    ),
    "EngineNotFoundError": (
        "The engine was not created, has another name, or its worker was restarted.",
        "Create the engine again, or pass its name as `engine_name`.",
    ),
    "BackendNotInstalledError": (
        "An optional package is missing.",
        "Run the command in the message.",
    ),
    "UnknownBackendError": (
        "A typing error in `make_scheduler`.",
        "Use `ray`, `local` or `inline`.",
    ),
    "AmbiguousAddressError": (
        "Several Ray clusters are reachable.",
        "Give one `address`, or set `RAY_ADDRESS`.",
    ),
    "ClusterNotFoundError": (
        "The cluster has ended, or the address or port is wrong.",
        "Start a cluster, or use `address='local'`.",
    ),
    "ClusterNotUpError": (
        "The launcher started the script itself on every node.",
        "Start `helmsman up -- python script.py` on every node instead.",
    ),
    "NodesMissingError": (
        "Nodes are still starting, or failed to start.",
        "Read the log of the missing nodes.",
    ),
    "RayStartError": (
        "Too little memory, shared memory or processes, or a taken port.",
        "Run `helmsman doctor`, and read the log that is quoted.",
    ),
    "ClusterLostError": (
        "Ray's `gcs_server` or raylet was killed, often for memory.",
        "Make a new scheduler.",
    ),
    "LauncherError": (
        "Nested launchers disagree, or the variables do not identify the node.",
        "Give `--node-rank`, `--num-nodes` and `--head`.",
    ),
    "BootstrapError": (
        "A node did not join, was refused, or lost the head; the exit code says which.",
        "Look the exit code up in [launchers](launchers.md).",
    ),
    "PreflightError": (
        "A taken port, small `/dev/shm` or unusable address.",
        "Run `helmsman doctor` on the node.",
    ),
    "ClusterMismatchError": (
        "Another job uses the address.",
        "Choose other ports, or end the other cluster.",
    ),
    "PlacementInfeasibleError": (
        "The job asks for more than the cluster has.",
        "Apply the change in the message; `helmsman plan` tries jobs without starting them.",
    ),
    "PlacementTimeoutError": (
        "Another run holds the resources.",
        "Wait, end the other run, or raise `Timeouts.start_s`.",
    ),
    "WorkerStartError": (
        "The worker's process ended or hung before its first answer.",
        "Read the end of its log, which the message quotes.",
    ),
    "CallTimeoutError": (
        "The call is slow, or its ranks wait for each other.",
        "Look at the stack in the message; raise the limit, or delete the workers.",
    ),
    "WorkerFailedError": (
        "The process was killed (for memory, mostly), crashed, or ended itself.",
        "Look at the signal and the log; restart the worker, or use supervision and recovery.",
    ),
    "EngineExistsError": ("`create_engine` ran twice.", "Give the second engine another name."),
    "EngineImportError": (
        "The path is wrong, or the module is missing on the worker's node.",
        "Correct the path, or pass the class itself.",
    ),
    "EngineCreationError": (
        "The constructor raised.",
        "Read the traceback of the worker in the message.",
    ),
    "MethodNotFoundError": (
        "A typing error, or a private method.",
        "Use one of the names that are suggested.",
    ),
    "EngineCallError": (
        "The engine's method raised.",
        "Read the traceback; the original exception is `__cause__` where it can be pickled.",
    ),
    "ArgumentNotSerializableError": (
        "A lock, socket, generator or similar object in an argument.",
        "Pass plain data, and build the object in the engine.",
    ),
    "ArgumentNotLoadableError": (
        "The worker cannot import the type of an argument.",
        "Install the module on every node, or set `PYTHONPATH` in `env_vars`.",
    ),
    "ResultNotSerializableError": (
        "As for arguments, in what the method returned.",
        "Return plain data.",
    ),
    "PeerNotReadyError": (
        "Another rank of the group failed first.",
        "Look at the error of that rank.",
    ),
    "WorkerBacklogError": (
        "The worker is stopped, or is sent more than it can receive.",
        "Await earlier calls, or end the worker.",
    ),
    "HandleLostError": (
        "The value was released, or its worker has ended.",
        "Call the method again.",
    ),
    "InstanceLostError": (
        "A rollout worker has exited.",
        "Use `retries=RetryGeneration()` and supervision.",
    ),
    "RequestDeadlineError": (
        "The deadline is short, or requests wait long.",
        "Raise it, or add instances.",
    ),
    "RequestsInFlightError": (
        "A pause or drain waited for long generations.",
        "Wait again, or end the requests with `abort`.",
    ),
    "ServerStartError": (
        "A missing model or package, or too little device memory for the server.",
        "Read the end of the server's output in the message.",
    ),
    "ServerRequestError": (
        "The server does not know the route or an argument; often another version.",
        "Install a version from [supported versions](versions.md).",
    ),
    "FaultsUnsupportedError": ("A fault drill on the inline scheduler.", "Use `local` or `ray`."),
    "EpisodeTimeoutError": (
        "An episode waits for a tool or a long generation.",
        "Give its parts limits of their own.",
    ),
    "WorkflowFailuresError": (
        "The episode function is broken.",
        "Correct the last error, which the message has.",
    ),
    "EngineDeadError": (
        "A process of vLLM was killed or crashed.",
        "Use `supervision=SupervisionPolicy()`.",
    ),
    "ServerLostError": (
        "The inference server was killed or crashed.",
        "Use supervision and `RetryGeneration()`.",
    ),
    "RewardTimeoutError": (
        "A slow or hanging reward function.",
        "Raise the limit, or correct the function.",
    ),
    "RewardLostError": (
        "The reward function ended its process.",
        "Score again if the reward function has no side effects.",
    ),
    "RewardWorkersSpentError": ("The reward function kills every worker.", "Correct the function."),
    "RendezvousError": (
        "A firewall between nodes, or a taken port.",
        "Open `HELMSMAN_PORT_RANGE` between the nodes.",
    ),
    "GroupCallError": (
        "One rank failed; others failed because of it.",
        "Correct the first error, `error.first`.",
    ),
    "CheckpointError": (
        "An incomplete checkpoint, or one of another model.",
        "Load the previous checkpoint.",
    ),
    "DevicesNotOwnedError": (
        "A call in the turn of the other role.",
        "Hand the devices over first.",
    ),
    "DeviceMemoryError": (
        "Trainer and rollout do not fit on the device together.",
        "Reduce the role that holds most; the message lists what each holds.",
    ),
    "RecoveryExhaustedError": (
        "Ranks are lost again and again, for example for memory.",
        "Correct the cause, then start the script again; it goes on from the checkpoint.",
    ),
    "DispatchError": (
        "Arguments or results do not fit the method's `@register`.",
        "Change the call or the declaration.",
    ),
    "UnevenBatchError": (
        "The batch does not divide over the ranks.",
        "Use a size that does, or `remainder='pad'`.",
    ),
    "TopologyMismatchError": (
        "The engine lays its ranks out otherwise than `ClusterConfig`.",
        "Use the same sizes in both.",
    ),
    "ParallelLayoutError": (
        "Parallel sizes that do not divide the model or the world.",
        "Choose sizes that divide it.",
    ),
    "ResourcesNotMetError": (
        "The cluster is smaller than the `ResourceManager` expects.",
        "Correct the counts.",
    ),
    "NotSerializableError": (
        "An object that pickle refuses, at the path that is named.",
        "Leave the field out.",
    ),
    "NotLoadableError": ("A type that cannot be imported here.", "Install its module."),
    "ProtocolError": (
        "Another program, or another version of Helmsman, at the port.",
        "Install the same version on all nodes.",
    ),
    "DeviceMismatchError": (
        "A device mask was changed in the worker.",
        "Remove the variable from `env_vars`.",
    ),
    "PlatformPicklingError": (
        "`current_platform` was sent to a worker.",
        "Import it in the worker.",
    ),
    "SchedulerClosedError": ("A call after the `with` block.", "Move the call into the block."),
    "ShutdownIncompleteError": (
        "A process ignores signals or waits for a disk.",
        "Run the command in the message.",
    ),
    "LogDirectoryError": ("A read-only or full directory.", "Pass another `log_dir`."),
    "UntrustedPathError": (
        "A file of another user at the path.",
        "Remove it, or pass another directory.",
    ),
}
"""Error -> its usual cause, and how to fix it."""

VALUES: dict[str, Any] = {
    "divisor": 5,
    "elapsed_s": 31.0,
    "exit_code": errors.BootstrapExit.PREFLIGHT,
    "limit": 16,
    "limit_bytes": 4 << 30,
    "limit_s": 30.0,
    "log_tail": "",
    "max_restarts": 3,
    "num_bytes": 65536,
    "num_expected": 4,
    "num_failed": 17,
    "num_queued": 7,
    "num_ranks": 8,
    "num_recoveries": 3,
    "num_rows": 12,
    "num_waiting_bytes": 4 << 30,
    "num_workers": 4,
    "pid": 4711,
    "port": 20001,
    "running_s": 31.0,
    "status": 400,
    "window": 256,
    "window_s": 3600.0,
    "worker_id": "rollout/3",
}
OMITTED = {"aftermath", "next_step", "unsent", "original"}
"""Optional fields without which a message shows more."""


def _sample(name: str, kind: str) -> Any:
    """A value for an error's field: its name in angle brackets, or a plausible number."""
    kind = re.sub(r"( \| None)|('|\")", "", kind)
    if name in VALUES:
        return VALUES[name]
    if kind.startswith("dict"):
        value: Any = {"int": 3, "tuple[str, str]": ("dp=0/2", "dp=1/2")}.get(
            kind[10:-1], "<reason>"
        )
        return {"rollout/3": _error() if "Error" in kind else value}
    plain = {
        "int": 3,
        "float": 3.0,
        "bool": True,
        "bytes": b"",
        "Sequence[int]": (2, 3),
        "HelmsmanError": None,
    }
    if kind in plain:
        return _error() if kind == "HelmsmanError" else plain[kind]
    if kind == "WorkerFailedError":
        return example(errors.WorkerFailedError)
    return (f"<{name}>",) if kind.startswith("Sequence") else f"<{name}>"


def _error() -> HelmsmanError:
    return errors.MethodNotFoundError(
        worker_id="rollout/3",
        engine_name="rollout",
        method="stepp",
        engine_type="Engine",
        suggestions=["step"],
    )


def example(cls: type[HelmsmanError]) -> HelmsmanError:
    """An error of a class with placeholders in its fields."""
    if cls is errors.BootstrapError:
        return cls("<reason>", exit_code=errors.BootstrapExit.NOT_JOINED)
    if not cls.field_names or issubclass(cls, errors.BootstrapError):
        return cls("<reason>")
    fields: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        fields |= {
            name: str(kind)
            for name, kind in inspect.get_annotations(base).items()
            if name in cls.field_names
        }
    empty = dict.fromkeys(fields.keys() & {"log_path", "refused"}, "")
    return cls(
        **{
            name: _sample(name, kind)
            for name, kind in fields.items()
            if not (name in OMITTED and hasattr(cls, name))
        }
        | empty
    )


def error_classes() -> list[type[HelmsmanError]]:
    """All public errors, in the order of the sources."""
    found = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, HelmsmanError)
    ]
    return [each for each in found if not each.__name__.startswith("_")]


def _parents(cls: type[HelmsmanError]) -> str:
    bases = [
        each
        for each in cls.__mro__[1:]
        if each not in (HelmsmanError, Exception, BaseException, object)
    ]
    return (
        ", ".join(f"`{each.__name__}`" for each in bases if not each.__name__.startswith("_"))
        or "`HelmsmanError`"
    )


def _message(error: HelmsmanError) -> str:
    lines = [
        line
        for part in str(error).split("\n")
        for line in (textwrap.wrap(part, 96, subsequent_indent="  ") or [""])
    ]
    return "\n".join(lines)


def errors_page() -> str:
    """The error catalogue, docs/errors.md."""
    parts = [
        "# Errors",
        "",
        f"<!-- Generated by `{COMMAND}` from helmsman/api/errors. -->",
        "",
        "All errors are subclasses of `helmsman.HelmsmanError` and are in `helmsman.errors`. Each",
        "message states the failure, its place, the observed and the expected value, and the next",
        "step. Text in angle brackets below stands for a field of the error, which a program reads",
        "as an attribute: `error.worker_id`. Errors are picklable, so they cross processes.",
        "",
        "| error | usual cause |",
        "|---|---|",
        *(f"| [{name}](#{name.lower()}) | {cause} |" for name, (cause, _) in CAUSES.items()),
    ]
    for cls in error_classes():
        if cls is HelmsmanError:
            continue
        name = cls.__name__
        parts += [
            "",
            f"## {name}",
            "",
            inspect.cleandoc(cls.__doc__ or "").split("\n\nArgs:")[0].replace("``", "`"),
            "",
        ]
        parts += [f"Also caught by: {_parents(cls)}.", ""]
        if name in CAUSES:
            cause, fix = CAUSES[name]
            parts += [f"- Cause: {cause}", f"- Fix: {fix}", ""]
        if cls.field_names:
            parts += ["Fields: " + ", ".join(f"`{field}`" for field in cls.field_names) + ".", ""]
        if name in CAUSES and cls.field_names:
            parts += ["```text", _message(example(cls)), "```"]
    return "\n".join(parts).rstrip() + "\n"


# --- settings -------------------------------------------------------------------------------------

STRUCTS = {
    "Timeouts": "helmsman/api/workers.py",
    "SamplingParams": "helmsman/api/generation.py",
    "RequestOptions": "helmsman/controller/_generation/request.py",
    "ProbePolicy": "helmsman/api/supervision.py",
    "SupervisionPolicy": "helmsman/controller/_generation/health.py",
    "RecoveryPolicy": "helmsman/controller/_training/recovery.py",
    "WeightFormat": "helmsman/api/weights.py",
    "SchedulingSpec": "helmsman/api/scheduler.py",
    "SchedulingStrategy": "helmsman/api/scheduler.py",
    "Job": "helmsman/api/scheduler.py",
    "TrainConfig": "helmsman/engines/train_config.py",
    "VLLMConfig": "helmsman/engines/vllm_config.py",
}
"""Classes of settings, with the files that define them."""


def settings_table(name: str) -> str:
    """Fields of a class of settings as a Markdown table with defaults and docstrings."""
    tree = ast.parse((ROOT / STRUCTS[name]).read_text())
    (node,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(each, ast.AnnAssign) or "ClassVar" in ast.unparse(each.annotation):
            continue
        default = f"`{ast.unparse(each.value)}`" if each.value else "required"
        doc = (
            after.value.value
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            else ""
        )
        meaning = " ".join(str(doc).replace("``", "`").replace("|", "\\|").split())
        rows.append(
            f"| `{ast.unparse(each.target)}` | {default.replace('|', chr(92) + '|')} | {meaning} |"
        )
    return "\n".join(rows)


MARK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def with_tables(page: str) -> str:
    """A page with its generated tables as they should be."""
    return MARK.sub(
        lambda found: f"<!-- table: {found[1]} -->\n\n{settings_table(found[1])}\n\n<!-- end -->",
        page,
    )


def generated() -> Iterator[tuple[Path, str]]:
    """The generated pages, with the content that they should have."""
    yield ROOT / "docs/errors.md", errors_page()
    settings = ROOT / "docs/settings.md"
    yield settings, with_tables(settings.read_text())


if __name__ == "__main__":
    for path, content in generated():
        path.write_text(content)
