"""Tests of TrainController and of its batch splitting, with a fake scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman._wire.group_keys import KEY_VARIABLE
from helmsman.api.errors import (
    CheckpointError,
    EngineCallError,
    EngineCreationError,
    GroupCallError,
    HelmsmanError,
    InvalidSpecError,
    RoleExistsError,
    WorkerStartError,
)
from helmsman.api.plan import Node
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Worker
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.ranks import sample_lengths, split_by_tokens, split_samples
from helmsman.controller._training.train_controller import TrainController, rank_environment  # type: ignore[attr-defined]
from tests.controller.engines import SAMPLES, CountingRollout, RecordingTrainer, count_loss
from tests.controller.fakes import FakeScheduler

# --- batch splitting ------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 5000), max_size=60), num_parts=st.integers(1, 9))
def test_split_by_tokens_is_complete_and_even(lengths: list[int], num_parts: int) -> None:
    shares = split_by_tokens(lengths, num_parts)
    assert len(shares) == num_parts
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    tokens = [sum(lengths[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert (
        max(tokens)
        <= sum(lengths) / num_parts + max(lengths, default=0) * (1 - 1 / num_parts) + 1e-9
    )
    assert shares == split_by_tokens(list(lengths), num_parts)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_parts=st.integers(1, 3))
def test_split_by_tokens_within_grahams_bound(lengths: list[int], num_parts: int) -> None:
    def best(remaining: list[int], loads: tuple[int, ...]) -> int:
        if not remaining:
            return max(loads)
        head, *rest = remaining
        options = {
            tuple(sorted((*loads[:i], loads[i] + head, *loads[i + 1 :]))) for i in range(num_parts)
        }
        return min(best(rest, option) for option in options)

    largest = max(
        sum(lengths[index] for index in share) for share in split_by_tokens(lengths, num_parts)
    )
    assert (
        largest
        <= best(sorted(lengths, reverse=True), (0,) * num_parts) * (4 / 3 - 1 / (3 * num_parts))
        + 1e-9
    )


def test_split_by_tokens_of_fewer_samples_than_parts() -> None:
    assert split_by_tokens([3, 5], 4) == [[1], [0], [], []]
    assert split_by_tokens([0, 0], 2) == [[0], [1]]
    with pytest.raises(ValueError, match="num_parts is 0"):
        split_by_tokens([1], 0)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_split_samples_keeps_pairs_together(num_parts: int) -> None:
    order = [0, 3, 1, 2, 3, 0, 2, 1]
    samples = [
        {"input_ids": [1] * (index + 1), "pair": number} for index, number in enumerate(order)
    ]
    shares = split_samples(samples, num_parts)
    assert sorted(index for share in shares for index in share) == list(range(8))
    for share in shares:
        assert share == sorted(share)
        numbers = [order[index] for index in share]
        assert all(numbers.count(number) == 2 for number in numbers)


def test_split_samples_refuses_half_a_pair() -> None:
    with pytest.raises(ValueError, match=r"pair 1 has 1 sample\(s\) \(2\)"):
        split_samples([{"input_ids": [1], "pair": number} for number in (0, 0, 1)], 2)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the batch has no samples"),
        ([{"input_ids": [1]}, 2], r"sample 1 is 2 \(type int\); expected a mapping"),
        ([{"loss_mask": [1]}], r"sample 0 has no column 'input_ids'; it has \['loss_mask'\]"),
        ([{"input_ids": [1]}, {"input_ids": []}], "sample 1: column 'input_ids' is empty"),
        ([{"input_ids": 3}], "sample 0: column 'input_ids' is a scalar"),
        ([{"input_ids": np.zeros((2, 3))}], r"sample 0: column 'input_ids' has shape \(2, 3\)"),
        (
            [
                {"input_ids": [1, 2], "loss_mask": [0, 1]},
                {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
            ],
            "sample 1: column 'loss_mask' has 2 entries, but 'input_ids' has 3",
        ),
        (
            [{"input_ids": [1], "reward": 1.0}, {"input_ids": [1]}],
            "sample 1 has no column 'reward', but sample 0 has",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "reward": 1.0}],
            "sample 0 has no column 'reward', but sample 1 has",
        ),
    ],
)
def test_sample_lengths_refuses_invalid_samples(
    samples: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_lengths(samples)


def test_sample_lengths_of_lists_arrays_and_scalars() -> None:
    sample = {
        "input_ids": np.arange(3),
        "loss_mask": [0, 1, 1],
        "reward": 1.0,
        "task": "sums",
        "group": np.int64(4),
    }
    assert sample_lengths([sample, {**sample, "input_ids": (1, 2, 3)}]) == [3, 3]


# --- start ----------------------------------------------------------------------------------------


def worker(index: int, ip: str, ports: list[str]) -> Worker:
    return Worker(id=f"actor/{index}", ip=ip, engine_ports=ports)


def test_rank_environment() -> None:
    workers = [
        worker(0, "10.0.0.7", ["20001", "20002"]),
        worker(1, "10.0.0.9", ["30001"]),
        worker(2, "10.0.0.7", ["20003"]),
    ]
    environment = rank_environment("actor", workers)
    (key,) = {each.pop(KEY_VARIABLE) for each in environment.values()}
    assert key == rank_environment("actor", workers)["actor/1"][KEY_VARIABLE]
    assert key.startswith("tls:")
    assert KEY_VARIABLE not in rank_environment("actor", workers[:1])["actor/0"]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "20001"}
    assert environment == {
        "actor/0": {**common, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        "actor/1": {**common, "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        "actor/2": {**common, "RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    }
    with pytest.raises(InvalidSpecError, match="port_count is 0; expected at least 1 for actor/0"):
        rank_environment("actor", [worker(0, "10.0.0.7", [])])


def controller(
    scheduler: Scheduler, replicas: int = 2, engine: type[Any] = RecordingTrainer, **options: Any
) -> TrainController:
    return TrainController(scheduler, engine, Job(role="actor", replicas=replicas), **options)


def test_initialize_calls_in_order(scheduler: FakeScheduler) -> None:
    with controller(scheduler, engine_args=("critic",)) as actor:
        actor.initialize()
        for rank in range(2):
            assert scheduler.methods(f"actor/{rank}") == [
                "__init__",
                "create_process_group",
                "initialize",
            ]
            assert scheduler.set_variables[f"actor/{rank}"]["RANK"] == str(rank)
            assert scheduler.set_variables[f"actor/{rank}"]["MASTER_PORT"] == "20000"
            assert scheduler.engines[f"actor/{rank}"].name == "critic"
        assert scheduler.probed == [("actor", scheduler.get_workers("actor")[0].ip, 20000)]
        actor.initialize()
        assert scheduler.methods("actor/0").count("__init__") == 1, "the second call does nothing"
    assert scheduler.jobs == {}


def test_initialize_adds_a_port(scheduler: FakeScheduler) -> None:
    job = Job(
        role="actor", replicas=2, tasks=[SchedulingSpec(port_count=3, cpu=2), SchedulingSpec()]
    )
    with TrainController(scheduler, RecordingTrainer, job) as actor:
        actor.initialize()
        assert [spec.port_count for spec in scheduler.jobs["actor"].tasks] == [3, 1]
        assert scheduler.jobs["actor"].tasks[0].cpu == 2


class FailsToBuild(RecordingTrainer):
    """Fails to build its second instance."""

    num_built = 0

    def __init__(self) -> None:
        super().__init__()
        FailsToBuild.num_built += 1
        if FailsToBuild.num_built == 2:
            raise MemoryError("no room for the model")


class FailsToMeet(RecordingTrainer):
    """Fails on rank 1; rank 0 loses its connection as a consequence."""

    def create_process_group(self) -> None:
        if self.worker_id == "actor/1":
            raise OSError("no network interface")
        raise ConnectionResetError("Connection reset by peer")


class FailsToInitialize(RecordingTrainer):
    """Fails on all ranks."""

    def initialize(self) -> None:
        raise FileNotFoundError("config.json")


@pytest.mark.parametrize(
    ("engine", "cause", "message"),
    [
        (FailsToBuild, EngineCreationError, "no room for the model"),
        (FailsToMeet, EngineCallError, "no network interface"),
        (FailsToInitialize, EngineCallError, "config.json"),
    ],
)
def test_initialize_that_fails_leaves_nothing(
    scheduler: FakeScheduler, engine: type[Any], cause: type[Exception], message: str
) -> None:
    FailsToBuild.num_built = 0
    with pytest.raises(GroupCallError, match=message) as caught:
        controller(scheduler, engine=engine).initialize()
    assert isinstance(caught.value.first, cause)
    assert scheduler.jobs == {}
    with controller(scheduler) as actor:  # the name is free again
        actor.initialize()


def test_initialize_of_a_running_role(scheduler: FakeScheduler) -> None:
    with controller(scheduler) as actor:
        actor.initialize()
        with pytest.raises(RoleExistsError):
            controller(scheduler).initialize()
        assert actor.get_version() == 0


def test_initialize_reports_a_failed_cleanup(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(role: str | None = None, reverse_order: bool = False) -> None:
        raise HelmsmanError("pid 7 would not end")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "delete_workers", refuses)
        with pytest.raises(GroupCallError, match=r"config\.json") as caught:
            controller(scheduler, engine=FailsToInitialize).initialize()
    assert caught.value.__notes__ == [
        "Deleting the workers of role 'actor' failed, too: pid 7 would not end"
    ]


def test_controller_refuses_invalid_jobs(scheduler: FakeScheduler) -> None:
    with pytest.raises(InvalidSpecError, match="replicas is "):
        controller(scheduler, replicas=0)
    with pytest.raises(
        ValueError, match="does not divide the 6 replicas of job 'actor'; valid sizes: 1, 2, 3, 6"
    ):
        controller(scheduler, replicas=6, model_parallel_size=4)


def test_controller_before_initialize_and_after_close(scheduler: FakeScheduler) -> None:
    actor = controller(scheduler)
    with pytest.raises(
        HelmsmanError, match=r"not started; use it in a `with` .* initialize\(\) first"
    ):
        actor.forward([{"input_ids": [1]}])
    actor.initialize()
    actor.close()
    actor.close()
    with pytest.raises(HelmsmanError, match="is closed; make a new one"):
        actor.get_version()
    with pytest.raises(HelmsmanError, match="is closed; make a new one"):
        actor.initialize()
    other = controller(scheduler)
    other.initialize()
    scheduler.close()
    other.close()  # there is nothing left to close


# --- batches --------------------------------------------------------------------------------------


def shares_of(scheduler: FakeScheduler, method: str) -> list[list[int]]:
    return [
        [sample["index"] for sample in call.args[0]]
        for call in scheduler.sent
        if call.method == method and call.args
    ]


def test_train_batch_gives_each_rank_its_share(scheduler: FakeScheduler) -> None:
    with controller(scheduler) as actor:
        actor.initialize()
        statistics = actor.train_batch(SAMPLES, count_loss, {"scale": 0.5}, timeout=30)
        assert statistics == {"num_samples": 3, "num_tokens": 13, "loss": 1.5}
        assert shares_of(scheduler, "train_batch") == [[0, 1, 2], [3, 4, 5]]
        assert actor.eval_batch(SAMPLES, count_loss) == {"num_samples": 3, "num_tokens": 13}
        assert actor.get_version() == 1
        scheduler.sent.clear()
        actor.train_batch(SAMPLES[:1], count_loss)
        assert shares_of(scheduler, "train_batch") == [[0], []], "a rank without samples takes part"


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), replicas=st.integers(1, 4))
def test_forward_keeps_the_order_of_samples(lengths: list[int], replicas: int) -> None:
    samples = [
        {"input_ids": [100 * i + t for t in range(length)]} for i, length in enumerate(lengths)
    ]
    with FakeScheduler() as scheduler, controller(scheduler, replicas=replicas) as actor:
        actor.initialize()
        assert actor.forward(samples) == [
            [-token for token in sample["input_ids"]] for sample in samples
        ]


def test_controller_refuses_invalid_batches(scheduler: FakeScheduler) -> None:
    with controller(scheduler) as actor:
        actor.initialize()
        num_sent = len(scheduler.sent)
        wrong = [
            {"input_ids": [1, 2], "loss_mask": [1, 1]},
            {"input_ids": [1], "loss_mask": [1, 1]},
        ]
        for call in (
            lambda: actor.train_batch([], count_loss),
            lambda: actor.eval_batch(wrong, count_loss),
            lambda: actor.forward(wrong),
        ):
            with pytest.raises(
                ValueError,
                match="the batch has no samples|sample 1: column 'loss_mask' has 2 entries",
            ):
                call()
        assert len(scheduler.sent) == num_sent


class OmitsResult(RecordingTrainer):
    """Returns no result for its last sample."""

    def forward(self, samples: Any) -> list[list[int]]:
        return super().forward(samples)[:-1]


def test_forward_refuses_too_few_results(scheduler: FakeScheduler) -> None:
    with controller(scheduler, engine=OmitsResult) as actor:
        actor.initialize()
        with pytest.raises(
            HelmsmanError,
            match="actor/0: forward returned 2 results for 3 samples",
        ):
            actor.forward(SAMPLES)


class FollowsHead(RecordingTrainer):
    """Returns nothing on ranks that receive no samples."""

    def forward(self, *args: Any) -> list[list[int]]:
        return super().forward(*args) if args else []


def test_forward_sends_shares_to_group_heads(scheduler: FakeScheduler) -> None:
    with controller(scheduler, replicas=4, engine=FollowsHead, model_parallel_size=2) as actor:
        actor.initialize()
        assert actor.forward(SAMPLES) == [
            [-token for token in sample["input_ids"]] for sample in SAMPLES
        ]
        calls = {call.worker_id: call for call in scheduler.sent if call.method == "forward"}
        assert [bool(calls[f"actor/{rank}"].args) for rank in range(4)] == [
            True,
            False,
            True,
            False,
        ]
        assert all(call.rpc_meta == {"broadcast": True} for call in calls.values())
        for method, value in (("set_version", 5), ("set_lr", 1e-4)):
            getattr(actor, method)(value)
            calls = {call.worker_id: call for call in scheduler.sent if call.method == method}
            assert set(calls) == {f"actor/{rank}" for rank in range(4)}
            assert all(
                call.args == (value,) and call.rpc_meta == {"broadcast": False}
                for call in calls.values()
            )


# --- weights --------------------------------------------------------------------------------------


def test_save_load_and_versions_on_every_rank(scheduler: FakeScheduler) -> None:
    with controller(scheduler) as actor:
        actor.initialize()
        actor.save(Path("/checkpoints/1"))
        actor.load(Path("/checkpoints/1"))
        actor.set_version(7)
        assert actor.get_version() == 7
        for rank in range(2):
            assert scheduler.engines[f"actor/{rank}"].log[-2:] == [
                "save /checkpoints/1",
                "load /checkpoints/1",
            ]
        scheduler.engines["actor/1"].version = 6
        with pytest.raises(
            HelmsmanError, match="hold different weight versions: {'actor/0': 7, 'actor/1': 6}"
        ):
            actor.get_version()


class Empty(RecordingTrainer):
    def publish_weights(self, target: Any, form: Any) -> Any:
        """Return nothing, on every rank."""


def test_update_rollout_refuses_nothing(scheduler: FakeScheduler) -> None:
    rollout = RolloutController(scheduler, CountingRollout, Job(role="rollout"))
    with (
        controller(scheduler, engine=Empty) as actor,
        rollout,
        pytest.raises(
            HelmsmanError,
            match="actor/0: publish_weights returned NoneType on rank 0; expected its weights",
        ),
    ):
        actor.update_rollout(rollout)


def test_update_rollout_makes_one_call_per_worker(scheduler: FakeScheduler) -> None:
    rollout = RolloutController(scheduler, CountingRollout, Job(role="rollout", replicas=3))
    with controller(scheduler) as actor, rollout:
        actor.initialize()
        rollout.initialize()
        actor.train_batch(SAMPLES, count_loss)
        assert actor.update_rollout(rollout) == 1
        assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1, "rollout/2": 1}
        exports = {
            call.worker_id: call.rpc_meta
            for call in scheduler.sent
            if call.method == "publish_weights"
        }
        assert exports == {"actor/0": {"keep": True}, "actor/1": {}}
        updates = [call.worker_id for call in scheduler.sent if call.method == "update_weights"]
        assert sorted(updates) == ["rollout/0", "rollout/1", "rollout/2"]
        assert scheduler.released == list(scheduler.kept)


class RefusesWeights(CountingRollout):
    """Refuses all weights."""

    async def update_weights(self, weights: Any, version: int) -> int:
        raise MemoryError("no room for new weights")


def test_update_rollout_that_fails_releases_the_weights(scheduler: FakeScheduler) -> None:
    rollout = RolloutController(scheduler, RefusesWeights, Job(role="rollout"))
    with controller(scheduler) as actor, rollout:
        actor.initialize()
        rollout.initialize()
        with pytest.raises(EngineCallError, match="no room for new weights"):
            actor.update_rollout(rollout)
        assert len(scheduler.kept) == 1
        assert scheduler.released == list(scheduler.kept)


# --- recovery -------------------------------------------------------------------------------------


class Scarce(FakeScheduler):
    """Has nodes, places and colocated roles that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.node_id = "a"
        self.living = ["a", "b"]
        self.starts_in_place = True
        self.has_siblings = False
        self.restarts: list[str] = []

    def nodes(self) -> list[Node]:
        return [Node(node_id=node_id, address="127.0.0.1") for node_id in self.living]

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        return [
            msgspec.structs.replace(worker, node_id=self.node_id)
            for worker in super().get_workers(role, timeout)
        ]

    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        self.restarts.append("elsewhere" if elsewhere else "in place")
        if elsewhere and self.has_siblings:
            raise InvalidSpecError(
                role=role, field="role", value=role, expected="a role without colocated roles"
            )
        if not (elsewhere or self.starts_in_place):
            raise self._start_error(role, "taken")
        if elsewhere:
            self.delete_workers(role)
            if not self.living:
                raise self._start_error(role, "none")
            self.create_workers(Job(role=role, replicas=2, tasks=[SchedulingSpec(port_count=1)]))
            self.node_id = self.living[-1]
        super().restart_workers(role)

    def _start_error(self, role: str, reason: str) -> WorkerStartError:
        return WorkerStartError(
            role=role, worker_id=f"{role}/0", node="a", reason=reason, log_path="", log_tail=""
        )


def test_recover_loads_before_the_version_is_raised() -> None:
    with Scarce() as scheduler, controller(scheduler) as actor:
        actor.initialize()
        actor.set_version(7)
        scheduler.sent.clear()
        assert actor.recover("/checkpoints/5") == 8
        assert scheduler.restarts == ["in place"]
        expected = [
            "__init__",
            "create_process_group",
            "initialize",
            "load",
            "get_version",
            "set_version",
        ]
        assert [scheduler.methods(f"actor/{rank}") for rank in range(2)] == [expected] * 2
        scheduler.engines["actor/0"].version = scheduler.engines["actor/1"].version = 3
        assert actor.recover() == 9, "the version is higher than that of the last recovery"


def test_recover_keeps_a_higher_version() -> None:
    class Loads9(RecordingTrainer):
        def load(self, path: str) -> None:
            self.version = 9

    with Scarce() as scheduler, controller(scheduler, engine=Loads9) as actor:
        actor.initialize()
        actor.set_version(4)
        assert actor.recover("/checkpoints/9") == 9
        assert actor.recover("/checkpoints/9") == 10


def test_recover_on_another_node() -> None:
    with Scarce() as scheduler, controller(scheduler) as actor:
        actor.initialize()
        scheduler.living = ["b"]
        actor.recover()
        assert scheduler.restarts == ["elsewhere"]
        assert {worker.node_id for worker in actor.workers} == {"b"}
        scheduler.starts_in_place = False
        actor.recover()
        assert scheduler.restarts == ["elsewhere", "in place", "elsewhere"]
        scheduler.living = []
        with pytest.raises(WorkerStartError, match="none"):
            actor.recover()
        assert "actor" not in scheduler.jobs
        actor.recover()
        assert scheduler.jobs["actor"].replicas == 2, "the role is created again"
        assert actor.num_recoveries == 4


def test_recover_with_siblings_stays_in_place() -> None:
    with Scarce() as scheduler, controller(scheduler) as actor:
        actor.initialize()
        scheduler.has_siblings, scheduler.starts_in_place = True, False
        with pytest.raises(WorkerStartError, match="taken"):
            actor.recover()
        scheduler.living = ["b"]
        with pytest.raises(InvalidSpecError, match="without colocated roles"):
            actor.recover()


class CannotLoad(RecordingTrainer):
    """Fails to load a checkpoint."""

    def load(self, path: str) -> None:
        raise ValueError(f"nothing is in {path}")


def test_load_names_the_checkpoint_that_failed(scheduler: FakeScheduler) -> None:
    with controller(scheduler, engine=CannotLoad) as actor:
        actor.initialize()
        with pytest.raises(
            CheckpointError, match="cannot load the checkpoint /checkpoints/1: nothing is in"
        ) as caught:
            actor.load(Path("/checkpoints/1"))
        assert isinstance(caught.value.__cause__, GroupCallError)
