"""Every error says what to do, and survives the way from a worker to the driver."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import pytest

from helmsman.api import errors
from helmsman.api.errors import HelmsmanError


class Row(NamedTuple):
    error: HelmsmanError
    facts: tuple[str, ...]
    """What the message must contain."""
    next_step: str
    """The advice, as a fragment of the message; empty for an internal error, which callers turn into another."""


CALL: dict[str, Any] = {"worker_id": "train/1", "engine_name": "actor", "method": "step"}
REMOTE: dict[str, Any] = {
    **CALL,
    "remote_type": "ZeroDivisionError",
    "remote_message": "division by zero",
    "remote_traceback": 'Traceback\n  File "engine.py", line 7, in step\nZeroDivisionError: division by zero\n',
    "node": "node-a",
    "log_path": "logs/train-1.log",
}
REMOTE_FACTS = (
    "train/1",
    "node-a",
    "ZeroDivisionError: division by zero",
    '  |   File "engine.py", line 7',
    "logs/train-1.log",
)
PAYLOAD: dict[str, Any] = {**CALL, "path": "args[0].lock", "value_type": "_thread.lock", "reason": "cannot pickle"}
PAYLOAD_FACTS = ("train/1: actor.step", "args[0].lock", "_thread.lock", "cannot pickle")
WORKER_FAILED = errors.WorkerFailedError(
    **CALL,
    node="node-a",
    pid=4711,
    cause="was killed by SIGKILL",
    exit_signal=9,
    running="actor.train",
    running_s=2.5,
    log_path="logs/train-1.log",
    log_tail="almost there\nlast words\n",
)
WORKER_FAILED_FACTS = (
    "train/1",
    "node-a",
    "4711",
    "SIGKILL",
    "actor.train",
    "2.5 s",
    "actor.step has no result",
    "logs/train-1.log",
    "  | last words",
)

ROWS = [
    Row(HelmsmanError("plain", a=1), ("plain",), ""),
    Row(errors.JobError("job 'train' is odd", role="train"), ("train",), ""),
    Row(errors.InvalidReplicasError(role="train", replicas=0), ("'train'", "0 replicas"), "Set Job.replicas to 1 or more"),
    Row(errors.TaskCountError(role="train", replicas=4, num_tasks=3), ("'train'", "3", "4 replicas"), "give either 1 spec"),
    Row(
        errors.InvalidSpecError(role="train", field="tasks[0].cpu", value=-1, expected="0 or more"),
        ("'train'", "tasks[0].cpu", "-1"),
        "expected 0 or more",
    ),
    Row(
        errors.JobsFileError(
            path="jobs.yaml", where="jobs[0].tasks[0].gpus", reason="SchedulingSpec has no such field; did you mean 'gpu'?"
        ),
        ("jobs.yaml", "jobs[0].tasks[0].gpus"),
        "did you mean 'gpu'?",
    ),
    Row(
        errors.RendezvousError(
            role="train",
            address="10.0.0.1",
            port=20001,
            source="rank 0 is train/0; 10.0.0.1 is the address of its node, and port 20001 is leased to it",
            refused="",
            reached=["train/0"],
            failed={"train/1": "No route to host", "train/2": "No route to host"},
        ),
        ("10.0.0.1:20001", "rank 0 is train/0", "2 of 3 ranks", "No route to host: train/1, train/2", "reached by train/0"),
        "no firewall closes the ports",
    ),
    Row(errors.RoleExistsError(role="train", num_workers=2), ("'train'", "2 workers"), "Call delete_workers('train') first"),
    Row(errors.NotFoundError(name="a", known=["c", "b"], where="the test"), ("'a'", "the test", "b, c"), ""),
    Row(errors.RoleNotFoundError(name="tran", known=["train"]), ("role 'tran'", "train"), "create_workers(job)"),
    Row(errors.WorkerNotFoundError(name="train", known=["train/0"]), ("worker 'train'", "train/0"), "'role/index'"),
    Row(
        errors.EngineNotFoundError(name="critic", known=[], where="train/0"),
        ("engine 'critic'", "train/0", "none"),
        "create_engine first",
    ),
    Row(errors.BackendError("no backend"), ("no backend",), ""),
    Row(
        errors.BackendNotInstalledError(backend="RayScheduler", package="ray", command="pip install 'helmsman[ray]'"),
        ("RayScheduler", "'ray'"),
        "Install it with: pip install 'helmsman[ray]'",
    ),
    Row(errors.UnknownBackendError(backend="slurm", known=["local", "ray"]), ("'slurm'",), "choose one of: local, ray"),
    Row(
        errors.AmbiguousAddressError(
            asked="address 'auto'", candidates=["10.0.0.1:6379", "10.0.0.1:6380"], step="Give the address of the one you mean"
        ),
        ("'auto'", "10.0.0.1:6379", "10.0.0.1:6380"),
        "Give the address of the one you mean",
    ),
    Row(
        errors.ClusterNotFoundError(asked="auto", reason="no Ray runs on this machine"),
        ("'auto'", "no Ray runs on this machine"),
        "or use address='local' for an embedded one",
    ),
    Row(
        errors.ClusterNotUpError(
            launcher="torchrun", said=["GROUP_RANK=1", "GROUP_WORLD_SIZE=2"], command="helmsman up -- python train.py"
        ),
        ("torchrun", "GROUP_RANK=1", "GROUP_WORLD_SIZE=2", "RAY_ADDRESS=local"),
        "Start one process on every node with `helmsman up -- python train.py`",
    ),
    Row(
        errors.NodesMissingError(num_expected=8, present=["gpu-0 (8 GPU)", "gpu-1 (8 GPU)"], elapsed_s=300.2, limit_s=300.0),
        ("8 nodes", "2 have joined", "gpu-0 (8 GPU)", "gpu-1 (8 GPU)", "300.2 s", "Timeouts.start_s"),
        "Look at the log of the nodes that are not in this list, or lower num_nodes",
    ),
    Row(
        errors.RayStartError(
            reason="RuntimeError: Timed out waiting",
            processes=["gcs_server (pid 5, sleeping)"],
            log_path="/tmp/ray/session/logs/gcs_server.err",
            log_tail="no space",
        ),
        ("Timed out waiting", "gcs_server (pid 5, sleeping)", "/tmp/ray/session/logs/gcs_server.err", "| no space"),
        "or start a cluster with `ray start --head` and give its address",
    ),
    Row(
        errors.ClusterLostError(
            cause="gcs_server (pid 7) was ended by SIGSEGV",
            exit_signal=11,
            log_path="/tmp/ray/session/logs/gcs_server.out",
            log_tail="check failed",
        ),
        ("gcs_server (pid 7) was ended by SIGSEGV", "logs/gcs_server.out", "check failed"),
        "Close the scheduler and start another",
    ),
    Row(errors.LauncherError("no node rank"), ("no node rank",), ""),
    Row(
        errors.LauncherConflictError(
            field="node rank", said=["Slurm: SLURM_NODEID=3", "torchrun: GROUP_RANK=1"], flag="--node-rank"
        ),
        ("node rank", "Slurm: SLURM_NODEID=3", "torchrun: GROUP_RANK=1"),
        "Start helmsman with --node-rank",
    ),
    Row(
        errors.LauncherIncompleteError(
            launcher="a Kubernetes Indexed Job", missing=["the number of nodes (--num-nodes)"], said=["JOB_COMPLETION_INDEX=3"]
        ),
        ("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX=3", "the number of nodes (--num-nodes)"),
        "Give it as a flag",
    ),
    Row(errors.BootstrapError("Ray did not start", log="x\nboom"), ("Ray did not start", "x\nboom"), ""),
    Row(
        errors.UnfitNodeError("port 6379 is held by pid 7. Choose another port by --port"),
        ("6379", "pid 7"),
        "Choose another port by --port",
    ),
    Row(
        errors.NotJoinedError("1 of 2 nodes are missing: rank 1. Look at what it has printed"),
        ("1 of 2", "rank 1"),
        "Look at what it has printed",
    ),
    Row(
        errors.NodeRefusedError("the head does not take this node: versions differ. Install the same on every node"),
        ("versions differ",),
        "Install the same on every node",
    ),
    Row(
        errors.RayDiedError("Ray has died on this node; its logs are in hm-1", log="out of memory"),
        ("out of memory",),
        "its logs are in hm-1",
    ),
    Row(errors.HeadLostError("the head at gpu-0:6380 cannot be reached"), ("gpu-0:6380",), ""),
    Row(errors.StrangeClusterError("the cluster is not that of this run; start it anew"), ("not that",), "start it anew"),
    Row(errors.GenerationError("request 'r0' failed"), ("r0",), ""),
    Row(
        errors.InstanceLostError(instance_id="rollout/3", reason="was ended by SIGKILL", may_have_begun=True),
        ("rollout/3", "may have begun", "SIGKILL"),
        "RetryGeneration",
    ),
    Row(
        errors.EngineDeadError(engine="VLLMEngine", reason="EngineCore (pid 7) ended by SIGKILL"),
        ("VLLMEngine", "pid 7", "SIGKILL"),
        "SupervisionPolicy builds such an instance anew",
    ),
    Row(
        errors.RequestDeadlineError(request_id="r0", state="running", instance="rollout/3", limit_s=2.5),
        ("'r0'", "2.5 s", "running on rollout/3"),
        "Raise the deadline",
    ),
    Row(errors.ServerError("the inference server is not running"), ("not running",), ""),
    Row(
        errors.ServerStartError(
            command="python -m vllm --port 20001",
            address="127.0.0.1:20001",
            reason="ended with exit code 1",
            exit_code=1,
            elapsed_s=2.5,
            limit_s=600.0,
            log_tail="no room for the cache",
            step="See what it wrote",
        ),
        (
            "127.0.0.1:20001",
            "600 s",
            "ended with exit code 1 after 2.5 s",
            "python -m vllm --port 20001",
            "no room for the cache",
        ),
        "See what it wrote",
    ),
    Row(
        errors.ServerLostError(address="127.0.0.1:20001", reason="it was ended by SIGKILL", exit_code=-9, log_tail="step 7"),
        ("127.0.0.1:20001", "SIGKILL", "step 7"),
        "supervision",
    ),
    Row(
        errors.ServerRequestError(
            address="127.0.0.1:20001",
            route="/pause",
            status=404,
            answer="Not Found",
            expected="200",
            step="Use a later version",
        ),
        ("/pause", "404", "200", "Not Found"),
        "Use a later version",
    ),
    Row(
        errors.FaultPlanError(line=2, text="kil a/0", found="'kil'", expected="'kill', 'hang', 'slow' or 'drop'"),
        ("line 2", "'kil a/0'", "found 'kil' where 'kill', 'hang'"),
        "Write 'kill rollout/3 at step 5'",
    ),
    Row(
        errors.FaultsUnsupportedError(scheduler="InlineScheduler"),
        ("InlineScheduler", "the script's own process"),
        "Run the drill on the 'local' or 'ray' scheduler",
    ),
    Row(
        errors.EpisodeTimeoutError(item=["2+2", 4], limit_s=30.0),
        ("['2+2', 4]", "30 s", "WorkflowExecutor.episode_timeout_s"),
        "lower max_new_tokens",
    ),
    Row(errors.RewardError("no score"), ("no score",), ""),
    Row(
        errors.RewardTimeoutError(
            worker_id="reward/1",
            call="score('2+2', 4)",
            elapsed_s=5.02,
            limit_s=5.0,
            then="The worker is started anew",
            stack='  File "sums.py", line 7, in check\n',
        ),
        ("reward/1", "score('2+2', 4)", "5.02 s", "limit 5 s", '  |   File "sums.py", line 7'),
        "Raise the limit if the function is only slow",
    ),
    Row(
        errors.RewardLostError(worker_id="reward/1", call="score('2+2', 4)", reason="was killed by SIGKILL"),
        ("score('2+2', 4)", "SIGKILL"),
        "Score the item again where that does no harm",
    ),
    Row(
        errors.RewardWorkersSpentError(
            role="reward", num_workers=4, max_restarts=64, window_s=3600.0, reason="was killed by SIGKILL"
        ),
        ("4 workers", "'reward'", "64", "3600 s", "SIGKILL"),
        "or allow more restarts",
    ),
    Row(
        errors.RequestsInFlightError(
            role="rollout", operation="wait_idle", in_flight={"rollout/1": 3}, num_queued=7, paused=True, limit_s=2.5
        ),
        ("'rollout'", "wait_idle", "2.5 s", "rollout/1 has 3", "It is paused, and 7 wait"),
        "end them with abort",
    ),
    Row(
        errors.WorkflowFailuresError(num_failed=17, limit=16, window=256, last=KeyError("answer")),
        ("17 of the last 256", "16 are tolerated", "KeyError: 'answer'"),
        "Mend the workflow",
    ),
    Row(errors.StartError("role 'train' did not start", role="train"), ("train",), ""),
    Row(
        errors.PlacementInfeasibleError(
            role="train",
            requested="2 x {GPU: 8}",
            observed="1 node with 4 GPU",
            shortfall="12 GPU",
            change="Set Job.replicas to 1, or add 1 node like gpu-0 (8 GPU)",
        ),
        ("'train'", "2 x {GPU: 8}", "1 node with 4 GPU", "12 GPU"),
        "Set Job.replicas to 1, or add 1 node like gpu-0 (8 GPU)",
    ),
    Row(
        errors.PlacementTimeoutError(
            role="train", requested="8 GPU", free="2 GPU", holders="run b", elapsed_s=61.04, limit_s=60
        ),
        ("'train'", "61.0 s", "60.0 s", "8 GPU", "2 GPU", "run b", "placement groups were removed"),
        "Wait for the holder",
    ),
    Row(
        errors.WorkerStartError(
            role="train", worker_id="train/1", node="node-a", reason="exit code 3", log_path="logs/t.log", log_tail="x\nboom"
        ),
        ("train/1", "node-a", "exit code 3", "taken down", "last 2 lines", "  | boom"),
        "log: logs/t.log",
    ),
    Row(errors.CallError("a call failed", **CALL), ("a call failed",), ""),
    Row(
        errors.CallTimeoutError(
            **CALL,
            elapsed_s=5.01,
            limit_s=5,
            limit_source="call_engine(timeout=5)",
            worker_alive=True,
            state="still running",
            stack='File "engine.py", line 7, in step',
            log_path="logs/train-1.log",
        ),
        ("train/1: actor.step", "5.01 s", "5.00 s", "timeout=5", "not sent again", "alive", "  | File", "logs/train-1.log"),
        "Raise the limit",
    ),
    Row(WORKER_FAILED, WORKER_FAILED_FACTS, "delete_workers('train')"),
    Row(
        errors.EngineExistsError(worker_id="train/1", engine_name="actor", engine_type="pkg.Actor"),
        ("train/1", "'actor'", "pkg.Actor"),
        "another engine_name",
    ),
    Row(
        errors.EngineImportError(worker_id="train/1", engine_name="actor", path="no.such.Thing", reason="No module named 'no'"),
        ("train/1", "'no.such.Thing'", "No module named 'no'"),
        "a class can be passed instead",
    ),
    Row(errors.EngineCreationError(**REMOTE), (*REMOTE_FACTS, "the constructor of engine 'actor'"), "traceback in the worker"),
    Row(
        errors.MethodNotFoundError(
            **{**CALL, "method": "stepp"}, engine_type="pkg.Actor", suggestions=["step"], reason="no such attribute"
        ),
        ("train/1", "'actor'", "pkg.Actor", "'stepp'", "no such attribute"),
        "Did you mean: step?",
    ),
    Row(errors.EngineCallError(**REMOTE), (*REMOTE_FACTS, "actor.step raised"), "traceback in the worker"),
    Row(errors.ExceptionNotSerializableError(**REMOTE), (*REMOTE_FACTS, "actor.step", "__cause__"), "traceback in the worker"),
    Row(errors.ArgumentNotSerializableError(**PAYLOAD), (*PAYLOAD_FACTS, "Nothing was sent"), "build it inside the engine"),
    Row(errors.ArgumentNotLoadableError(**PAYLOAD), (*PAYLOAD_FACTS, "did not run"), "importable in the worker"),
    Row(errors.ResultNotSerializableError(**PAYLOAD), (*PAYLOAD_FACTS, "not repeated"), "Return plain data"),
    Row(
        errors.PeerNotReadyError(**CALL, ranks=[2, 3], reason="out of memory"),
        ("train/1: actor.step", "2, 3", "out of memory"),
        "Look at the error of that rank first",
    ),
    Row(
        errors.HandleLostError(worker_id="train/1", handle_id="h7", reason="its worker died"),
        ("h7", "train/1", "its worker died"),
        "Produce it again",
    ),
    Row(
        errors.GroupCallError(
            role="train",
            method="step",
            first=WORKER_FAILED,
            errors={"train/1": WORKER_FAILED, "train/0": errors.EngineCallError(**{**REMOTE, "worker_id": "train/0"})},
            num_ranks=4,
        ),
        ("train: step", "2 of 4 ranks", "1 other rank(s)", "train/0", *(fact.strip() for fact in WORKER_FAILED_FACTS)),
        "Root cause:",
    ),
    Row(
        errors.CheckpointError(role="train", path="runs/a/step-000040", reason="it has no helmsman.json"),
        ("'train'", "runs/a/step-000040", "it has no helmsman.json"),
        "Remove it to go on from the one before it",
    ),
    Row(
        errors.OutOfTurnError(
            role="train", method="train_batch", owner="role 'rollout''s", next_step="Call to_training() first, or train there."
        ),
        ("'train'", "train_batch", "role 'rollout''s"),
        "Call to_training() first",
    ),
    Row(
        errors.DeviceMemoryError(
            worker_id="train/1",
            method="train_batch",
            reason="CUDA out of memory. Tried to allocate 2.00 GiB",
            owner="role 'train''s",
            figures=("train/1: 70.0 GiB allocated", "rollout/0: 2.0 GiB allocated"),
        ),
        ("train/1", "train_batch", "Tried to allocate 2.00 GiB", "role 'train''s", "70.0 GiB", "rollout/0: 2.0 GiB allocated"),
        "Give less to the role that holds most",
    ),
    Row(
        errors.RecoveryExhaustedError(
            loss=WORKER_FAILED,
            num_recoveries=3,
            window_s=3600.0,
            checkpoint="runs/a/step-000040",
            reason="PlacementTimeoutError: 8 GPU are held by others",
        ),
        (
            *("'train'", "rank 1", "train/1", "node-a", "4711", "SIGKILL", "3 recoveries within 3600 s", "max_recoveries"),
            *("PlacementTimeoutError: 8 GPU are held by others", "logs/train-1.log", "  | last words"),
        ),
        "start the script again to go on from runs/a/step-000040",
    ),
    Row(
        errors.DispatchError(
            method="Actor.step",
            reason="execute mode RANK_ZERO gives the batch to one rank, and dispatch mode DP_MP_COMPUTE cuts it for 4",
            step="Declare Execute.ALL",
        ),
        ("Actor.step", "RANK_ZERO", "DP_MP_COMPUTE cuts it for 4"),
        "Declare Execute.ALL",
    ),
    Row(
        errors.UnevenBatchError(
            num_rows=12, divisor=5, derivation="dp = 20 ranks / (tp 2 x pp 2 x cp 1)", what="argument 'batch' of Actor.step"
        ),
        ("argument 'batch' of Actor.step", "12 rows", "5 parts", "dp = 20 ranks / (tp 2 x pp 2 x cp 1) = 5", "10 and 15"),
        "declare remainder='pad'",
    ),
    Row(
        errors.TopologyMismatchError(
            cluster="actor_train",
            num_ranks=32,
            differences={
                "actor_train/1": ("dp=0/2 tp=1/2", "dp=1/2 tp=0/2"),
                **{f"actor_train/{rank}": ("dp=1/2 tp=0/2", "dp=0/2 tp=1/2") for rank in range(2, 20)},
            },
        ),
        ("19 of the 32 ranks", "'actor_train'", "actor_train/1   dp=0/2 tp=1/2; it says dp=1/2 tp=0/2", "and 3 more"),
        "Make the sizes and mesh of worker_config those of their parallel groups",
    ),
    Row(
        errors.ParallelLayoutError(
            what="tensor_parallel_size", requested=3, observed="a world of 4 ranks", step="Set it to 1, 2 or 4"
        ),
        ("tensor_parallel_size asks for 3", "a world of 4 ranks"),
        "Set it to 1, 2 or 4",
    ),
    Row(
        errors.ResourcesNotMetError(
            requested="2 nodes with 8 devices each",
            observed="node-a: 8 GPU\nnode-b: 4 GPU",
            step="Set num_gpus_per_node to 4",
        ),
        ("  2 nodes with 8 devices each", "  node-a: 8 GPU\n  node-b: 4 GPU"),
        "Set num_gpus_per_node to 4",
    ),
    Row(errors.CodecError(path="x", value_type="int", reason="odd"), ("x", "int", "odd"), ""),
    Row(errors.NotSerializableError(path="x.f", value_type="lambda", reason="odd"), ("x.f", "lambda", "odd"), ""),
    Row(errors.NotLoadableError(path="x.f", value_type="lambda", reason="odd"), ("x.f", "lambda", "odd"), ""),
    Row(errors.ProtocolError("bad frame"), ("bad frame",), ""),
    Row(errors.PlatformError("no device", num_devices=0), ("no device",), ""),
    Row(
        errors.DeviceMismatchError(
            where="train/3",
            granted="cuda 4,5",
            mask="CUDA_VISIBLE_DEVICES='4'",
            counted="torch counts 1 cuda devices in this process",
            step="Do not set the mask",
        ),
        ("train/3", "cuda 4,5", "CUDA_VISIBLE_DEVICES='4'", "counts 1"),
        "Do not set the mask",
    ),
    Row(errors.PlatformPicklingError(name="cuda"), ("cuda",), "inside the worker instead"),
    Row(errors.SchedulerClosedError(operation="call_engine"), ("call_engine", "closed"), "Make a new scheduler"),
    Row(
        errors.UntrustedPathError(
            path="/tmp/helmsman-ada", observed="a directory", expected="a directory of ada", owner="mallory (uid 1002)"
        ),
        ("/tmp/helmsman-ada", "a directory of mallory (uid 1002)", "expected a directory of ada"),
        "XDG_STATE_HOME",
    ),
    Row(
        errors.ShutdownIncompleteError(operation="close()", remaining=["pid 1", "pid 2"], elapsed_s=10, command="kill 1 2"),
        ("close()", "2 thing(s)", "pid 1; pid 2", "10.0 s"),
        "Remove them with: kill 1 2",
    ),
]
BY_NAME = {type(row.error).__name__: row for row in ROWS}
each_error = pytest.mark.parametrize("row", ROWS, ids=list(BY_NAME))


def public_errors() -> set[type[HelmsmanError]]:
    return {
        value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, HelmsmanError) and not name.startswith("_")
    }


def test_every_error_class_has_exactly_one_row() -> None:
    assert sorted(type(row.error).__name__ for row in ROWS) == sorted(cls.__name__ for cls in public_errors())


@each_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_message_and_fields(row: Row, protocol: int) -> None:
    assert_same(pickle.loads(pickle.dumps(row.error, protocol)), row.error)


@each_error
def test_cloudpickle_and_copies_keep_type_message_and_fields(row: Row) -> None:
    assert_same(pickle.loads(cloudpickle.dumps(row.error)), row.error)
    assert_same(copy.copy(row.error), row.error)
    assert_same(copy.deepcopy(row.error), row.error)


def assert_same(restored: Any, error: HelmsmanError) -> None:
    assert type(restored) is type(error)
    assert str(restored) == str(error) != ""
    assert restored.args == error.args
    assert plain(restored) == plain(error)
    assert getattr(restored, "msg", None) == getattr(error, "msg", None)  # ImportError keeps its message outside __dict__


def plain(value: Any) -> Any:
    """Nested errors as comparable data, for exceptions compare by identity."""
    if isinstance(value, HelmsmanError):
        return type(value), str(value), {key: plain(item) for key, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def test_notes_survive_pickling() -> None:
    error = errors.SchedulerClosedError(operation="call_engine")
    error.add_note("while the demo stopped")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while the demo stopped"]


def test_subclass_of_a_user_survives_pickling() -> None:
    restored = pickle.loads(pickle.dumps(ErrorOfAUser(role="train", replicas=0)))
    assert isinstance(restored, ErrorOfAUser)
    assert restored.role == "train"


class ErrorOfAUser(errors.InvalidReplicasError):
    pass


@each_error
def test_message_has_its_facts_and_a_next_step(row: Row) -> None:
    message = str(row.error)
    for part in (*row.facts, row.next_step):
        assert part in message
    assert "None" not in message
    assert "{" not in re.sub(r"\{GPU: 8\}", "", message), "an unfilled placeholder"


@each_error
def test_keyword_arguments_of_the_constructor_become_fields(row: Row) -> None:
    for cls in type(row.error).__mro__:
        for field in vars(cls).get("__annotations__", {}):
            if not field.startswith("_"):
                assert hasattr(row.error, field), f"{cls.__name__} promises {field}"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidReplicasError", ValueError),
        ("TaskCountError", ValueError),
        ("InvalidSpecError", ValueError),
        ("RoleExistsError", ValueError),
        ("RoleNotFoundError", LookupError),
        ("WorkerNotFoundError", LookupError),
        ("EngineNotFoundError", LookupError),
        ("BackendNotInstalledError", ImportError),
        ("UnknownBackendError", ValueError),
        ("AmbiguousAddressError", ValueError),
        ("ClusterNotFoundError", ConnectionError),
        ("NodesMissingError", TimeoutError),
        ("LauncherError", ValueError),
        ("UnfitNodeError", ValueError),
        ("NotJoinedError", TimeoutError),
        ("HeadLostError", ConnectionError),
        ("StrangeClusterError", ConnectionError),
        ("InstanceLostError", ConnectionError),
        ("RequestDeadlineError", TimeoutError),
        ("ServerLostError", ConnectionError),
        ("EngineDeadError", ConnectionError),
        ("FaultPlanError", ValueError),
        ("EpisodeTimeoutError", TimeoutError),
        ("RewardTimeoutError", TimeoutError),
        ("RequestsInFlightError", TimeoutError),
        ("PlacementTimeoutError", TimeoutError),
        ("CallTimeoutError", TimeoutError),
        ("EngineImportError", ImportError),
        ("MethodNotFoundError", AttributeError),
        ("ArgumentNotSerializableError", TypeError),
        ("ResultNotSerializableError", TypeError),
        ("HandleLostError", LookupError),
        ("DispatchError", TypeError),
        ("UnevenBatchError", ValueError),
        ("NotSerializableError", TypeError),
        ("PlatformPicklingError", TypeError),
    ],
)
def test_can_be_caught_as_the_builtin_it_is(name: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match=re.escape(str(BY_NAME[name].error)[:20])):
        raise BY_NAME[name].error


def test_exit_codes_of_the_bootstrap_tell_errors_apart() -> None:
    codes = {cls.__name__: cls.exit_code for cls in public_errors() if issubclass(cls, errors.BootstrapError)}
    del codes["BootstrapError"]
    assert len(set(codes.values())) == len(codes)
    assert all(2 < code < 126 for code in codes.values()), "neither argparse's nor a shell's"


def test_group_error_has_its_root_cause_as_cause() -> None:
    error = BY_NAME["GroupCallError"].error
    assert error.__cause__ is WORKER_FAILED


def test_control_calls_without_an_engine_are_named_by_their_verb() -> None:
    error = errors.PeerNotReadyError(worker_id="train/1", engine_name=None, method="configure", ranks=[1], reason="gone")
    assert "train/1: configure did not run" in str(error)


def test_missing_method_without_suggestion_says_what_may_be_called() -> None:
    error = errors.MethodNotFoundError(**CALL, engine_type="pkg.Actor", suggestions=[])
    assert "methods of pkg.Actor without a leading underscore" in str(error)


def test_long_lists_of_known_names_are_cut() -> None:
    message = str(errors.WorkerNotFoundError(name="x", known=[f"train/{i}" for i in range(1000)]))
    assert "and 980 more" in message
    assert len(message) < 500


def test_signal_name_of_known_and_unknown_numbers() -> None:
    assert errors.signal_name(9) == "SIGKILL"
    assert errors.signal_name(99) == "signal 99"


def test_docstring_of_the_module_draws_the_real_tree() -> None:
    drawn = {name: (parent, builtins) for name, parent, builtins in drawn_tree(errors.__doc__ or "")}
    real = {cls.__name__: real_place(cls) for cls in public_errors() if cls is not HelmsmanError}
    assert drawn == real


def drawn_tree(text: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """(name, parent, built-in bases) of each line of the tree."""
    ancestors = ["HelmsmanError"]
    for prefix, name, builtins in re.findall(r"^([│ ]*[├└]── )(\w+)(?: \(([\w, ]+)\))?", text, re.MULTILINE):
        depth = len(prefix) // 4
        del ancestors[depth:]
        yield name, ancestors[-1], frozenset(builtins.split(", ")) if builtins else frozenset()
        ancestors.append(name)


def real_place(cls: type[HelmsmanError]) -> tuple[str, frozenset[str]]:
    """Nearest public ancestor, and the built-in bases that the class itself adds; private classes in between are not drawn."""
    ours = [base for base in cls.__mro__[1:] if issubclass(base, HelmsmanError) and not base.__name__.startswith("_")]
    builtins = {base.__name__ for base in cls.__bases__ if not issubclass(base, HelmsmanError)}
    return ours[0].__name__, frozenset(builtins)
