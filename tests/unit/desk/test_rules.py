"""Tests of the rules of diagnose_run on snapshots of runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman._desk.diagnosis import Diagnosis, diagnose_run
from helmsman._desk.evidence import Finding
from helmsman._desk.stacks import named, place, site_of, wait_of
from helmsman._desk.texts import why_text
from helmsman.api.run_state import (
    CollectiveState,
    Frame,
    NcclRank,
    OpenCall,
    ProcessReport,
    RequestSnapshot,
    RolloutSnapshot,
    RunSnapshot,
    StackTrace,
    WorkerSnapshot,
)
from helmsman.api.workers import WorkerHealth

GIB = 1 << 30


def report(**fields: Any) -> ProcessReport:
    defaults: dict[str, Any] = {
        "pid": 1,
        "cpu_s": 1.0,
        "rss_bytes": GIB,
        "swap_bytes": 0,
        "clock_jump_s": 0.0,
        "stacks": [],
        "node": "10.0.0.1",
        "memory_available": 8 * GIB,
        "disks": {"/dev/shm": (8 * GIB, 16 * GIB)},
    }
    return ProcessReport(**(defaults | fields))


def worker(worker_id: str, **fields: Any) -> WorkerSnapshot:
    node = fields.get("node", "10.0.0.1")
    defaults: dict[str, Any] = {
        "worker_id": worker_id,
        "role": worker_id.rpartition("/")[0],
        "node": node,
        "pid": 7,
        "state": "ready",
        "log_path": "/logs/a-0.log",
        "world_size": 2,
        "is_group": True,
        "health": WorkerHealth(worker_id=worker_id, pid=7, node=node, engines={}),
        "report": report(),
    }
    return WorkerSnapshot(**(defaults | fields))


def run(*workers: WorkerSnapshot, **fields: Any) -> RunSnapshot:
    defaults: dict[str, Any] = {
        "run_id": "0123456789",
        "command": "train.py",
        "scheduler": "RayScheduler",
        "host": "head",
        "pid": 3,
        "log_dir": "/logs",
        "started_at": 0.0,
        "taken_at": 101.0,
        "workers": list(workers),
        "script": report(),
    }
    return RunSnapshot(**(defaults | fields))


def diagnosed(now: RunSnapshot) -> Diagnosis:
    return diagnose_run(now, msgspec.structs.replace(now, taken_at=now.taken_at - 1.0))


def only(now: RunSnapshot) -> Finding:
    (finding,) = diagnosed(now).findings
    return finding


def in_call(frame: Frame, **fields: Any) -> dict[str, Any]:
    age_s = fields.pop("age_s", 100.0)
    stack = StackTrace(thread="engine", frames=[frame], call="a/0.step", running_s=age_s)
    call = OpenCall(name="a/0.step", age_s=age_s, median_s=1.0)
    return {"calls": [call], "report": report(stacks=[stack], **fields)}


def test_healthy_run() -> None:
    diagnosis = diagnosed(run(worker("a/0"), worker("a/1")))
    assert diagnosis.is_healthy
    assert diagnosis.findings == []
    assert "No call is open" in diagnosis.waits_for


@pytest.mark.parametrize(
    ("fields", "rule", "text"),
    [
        (
            {"disks": {"/dev/shm": (10 << 20, 16 * GIB)}},
            "disk full",
            "/dev/shm on 10.0.0.1 is full: 10 MiB of 16384 MiB are free.",
        ),
        (
            {"memory_available": 100 << 20},
            "memory full",
            "10.0.0.1 has 100 MiB of memory left.",
        ),
        (
            {"swap_bytes": GIB},
            "swapping",
            "1024 MiB of a/0 on 10.0.0.1 are swapped out.",
        ),
        (
            {"clock_jump_s": -3600.0},
            "clock set",
            "The clock of 10.0.0.1 was set back by 60 min during the run.",
        ),
    ],
)
def test_nodes(fields: dict[str, Any], rule: str, text: str) -> None:
    finding = only(run(worker("a/0", report=report(**fields))))
    assert (finding.rule, finding.cause, finding.is_problem) == (rule, text, True)
    assert finding.next_step


SLEEPS = StackTrace(
    thread="main", frames=[Frame("/home/me/train.py", 91, "main", "time.sleep(20)")]
)
RECEIVES = StackTrace(
    thread="main", frames=[Frame("/home/me/train.py", 92, "main", "judge.recv(1)")]
)
IDLE_THREAD = StackTrace(
    thread="asyncio_0",
    frames=[
        Frame("/usr/lib/python3.11/concurrent/futures/thread.py", 81, "_worker", "queue.get()")
    ],
)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (SLEEPS.frames[0], "the script sleeps at train.py:91 (time.sleep(20))."),
        (
            Frame("/home/me/train.py", 12, "main", "total += 1"),
            "the script runs its own code at train.py:12 (total += 1).",
        ),
        (
            Frame("/usr/lib/python3.11/selectors.py", 468, "select", "self._selector.poll(1)"),
            "the script's event loop is idle.",
        ),
    ],
)
def test_waits_for_describes_the_script(frame: Frame, text: str) -> None:
    script = report(stacks=[StackTrace(thread="main", frames=[frame])])
    assert diagnosed(run(script=script)).waits_for == f"No call is open; {text}"


def test_script_waits_for_helmsman() -> None:
    frames = [*RECEIVES.frames, Frame("/opt/helmsman/_base/event_loop.py", 7, "run", "")]
    script = report(stacks=[StackTrace(thread="main", frames=frames)])
    assert diagnosed(run(worker("a/0"), script=script, idle_s=60.0)).findings == []


def test_script_with_tasks_that_end() -> None:
    """The script awaits hundreds of judges, a few at a time."""
    judges = Frame("/home/me/train.py", 30, "judge", "async with slots:")
    tasks = [StackTrace(thread="task judge", frames=[judges])] * 3
    now = run(worker("a/0"), script=report(stacks=[RECEIVES, *tasks[1:]]), idle_s=60.0)
    before = run(worker("a/0"), script=report(stacks=[RECEIVES, *tasks]), idle_s=59.0, taken_at=100)
    assert diagnose_run(now, before).findings == []
    assert only(now).rule == "script waits"


def test_rollout_with_all_instances_drained() -> None:
    rollout = RolloutSnapshot(
        role="rollout",
        num_queued=1,
        num_in_flight=0,
        num_done=0,
        num_tokens_done=0,
        paused_by=[],
        version=0,
        is_asleep=False,
        instances={"rollout/0": "drained", "rollout/1": "drained"},
        median_s=None,
        requests=[RequestSnapshot(request_id="1", age_s=60.0, instance_id="")],
    )
    finding = only(run(rollouts=[rollout]))
    assert finding.rule == "rollout starved"
    assert "no instance serves (rollout/0 is drained, rollout/1 is drained)" in finding.cause
    assert finding.next_step == "helmsman resume rollout/0 ends its drain."


def test_why_text_shows_no_terminal_codes() -> None:
    stack = StackTrace(thread="engine", frames=SLEEPS.frames, call="a/0.step", running_s=100.0)
    call = OpenCall(name="a/0.step", age_s=100.0, median_s=1.0)
    child = {7: ("Z", "sh -c \x1b[2J\nworker b/0 is dead")}
    found = report(stacks=[stack], children=child)
    text = why_text(diagnosed(run(worker("a/0", calls=[call], report=found))))
    assert "sh -c ?[2J?worker b/0 is dead" in text


def test_script_sleeps_beside_idle_threads() -> None:
    """Helmsman starts such a thread when the reply of a worker is late."""
    script = report(stacks=[SLEEPS, IDLE_THREAD])
    assert diagnosed(run(worker("a/0"), script=script, idle_s=60.0)).findings == []


def test_script_waits_beside_idle_threads() -> None:
    script = report(stacks=[RECEIVES, IDLE_THREAD])
    finding = only(run(worker("a/0"), script=script, idle_s=60.0))
    assert (finding.rule, finding.since_s) == ("script waits", 60.0)
    assert finding.cause == (
        "The script waits for something outside Helmsman: main waits for a network peer at "
        "train.py:92 (judge.recv(1)). No call or request is open."
    )
    assert finding.evidence[0].startswith("asyncio_0 waits for a message")


def test_disk_of_script_full() -> None:
    full = report(disks={"/logs": (0, GIB)}, node="")
    finding = only(run(worker("a/0"), script=full))
    assert finding.cause == "/logs on the script's node head is full: 0 MiB of 1024 MiB are free."


def test_node_silent() -> None:
    silent = {"node": "10.0.0.2", "health": None, "report": None, "error": "no answer in 1 s"}
    finding = only(run(worker("a/0"), worker("a/1", **silent), worker("a/2", **silent)))
    assert finding.rule == "node silent"
    assert finding.subject == "10.0.0.2"
    assert finding.workers == ["a/1", "a/2"]
    assert finding.cause == "Node 10.0.0.2 is silent: none of its workers (a/1-2) answers."
    assert finding.evidence == ["no answer in 1 s"]


def test_worker_silent() -> None:
    silent = worker("a/1", health=None, report=None, error="no answer in 1 s")
    finding = only(run(worker("a/0"), silent))
    assert finding.rule == "worker silent"
    assert finding.cause == "a/1 on node 10.0.0.1 does not answer and cannot be observed."


def test_collective_stuck() -> None:
    frame = Frame("/home/me/train.py", 210, "train_batch", "dist.all_reduce(grad)")
    finding = only(run(worker("a/0", **in_call(frame)), worker("a/1", **in_call(frame))))
    assert finding.rule == "collective stuck"
    assert "All 2 ranks of 'a' have entered the same collective" in finding.cause
    assert "a/0-1 waits in all_reduce at train.py:210" in finding.cause


def entered(number: int, name: str, sizes: list[list[int]], **fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"group": "0 default_pg", "age_s": 100.0, "is_done": False}
    state = CollectiveState(number=number, name=name, sizes=sizes, **(defaults | fields))
    return in_call(Frame("train.py", 7, "step", "loss.item()"), collectives=[state])


def test_recorded_collective_mismatch() -> None:
    """All ranks wait at the same line, with tensors of different shapes."""
    odd = entered(4, "nccl:all_reduce", [[8]])
    same = entered(4, "nccl:all_reduce", [[4]])
    now = run(*(worker(f"a/{i}", world_size=3, **(odd if i == 2 else same)) for i in range(3)))
    finding = only(now)
    assert (finding.rule, finding.subject) == ("collective mismatch", "a/2")
    assert "a/0-1 entered collective 4 of group '0 default_pg'" in finding.cause
    assert "a/2 entered nccl:all_reduce of shapes [[8]]" in finding.cause


def test_recorded_collective_missing() -> None:
    behind = entered(3, "nccl:all_gather", [[4]], is_done=True)
    now = run(worker("a/0", **entered(4, "nccl:all_reduce", [[4]])), worker("a/1", **behind))
    finding = only(now)
    assert (finding.rule, finding.subject) == ("rank missing in collective", "a/1")
    assert "does not enter collective 4" in finding.cause
    assert "its last one is 3, nccl:all_gather" in finding.evidence


@pytest.mark.parametrize("fields", [{"is_done": True}, {"age_s": 4.0}], ids=["done", "recent"])
def test_recorded_collective_healthy(fields: dict[str, Any]) -> None:
    ahead = entered(4, "gloo:all_reduce", [[4]], **fields)
    behind = entered(3, "gloo:all_reduce", [[4]], is_done=True)
    found = diagnosed(run(worker("a/0", **ahead), worker("a/1", **behind))).findings
    assert "rank missing in collective" not in [each.rule for each in found]


@pytest.mark.parametrize(
    ("fields", "rule", "text"),
    [
        ({"problem": "dead"}, "NCCL rank lost", "is dead, by NCCL's RAS service"),
        (
            {"num_collectives": 3},
            "rank missing in collective",
            "has called 3 collectives, others 4",
        ),
    ],
)
def test_nccl_ranks(fields: dict[str, Any], rule: str, text: str) -> None:
    ranks = [
        NcclRank(communicator="0xa", rank=0, host="10.0.0.1", pid=7, num_collectives=4),
        NcclRank(communicator="0xa", rank=1, host="10.0.0.2", pid=7, **fields),
        NcclRank(communicator="0xb", rank=0, host="10.0.0.3", pid=1, problem="dead"),
    ]
    now = run(worker("a/0", report=report(nccl_ranks=ranks)), worker("a/1", node="10.0.0.2"))
    finding = only(now)
    assert (finding.rule, finding.subject) == (rule, "a/1")
    assert f"a/1, rank 1 of NCCL communicator 0xa, {text}" in finding.cause


def test_rank_that_computes() -> None:
    """A slow rank becomes a problem when it takes ten times as long as usual."""
    waits = Frame("/home/me/train.py", 210, "train_batch", "dist.all_reduce(grad)")
    loads = Frame("/home/me/data.py", 88, "load", "json.loads(line)")
    for age_s, cpu_s, is_healthy in (
        (8.0, 9.0, True),
        (8.0, 1.0, True),
        (100.0, 9.0, False),
        (11.0, 1.0, False),
    ):
        late = worker("a/1", **in_call(loads, age_s=age_s, cpu_s=cpu_s))
        now = run(worker("a/0", **in_call(waits, age_s=age_s)), late)
        before = run(
            worker("a/0", **in_call(waits, age_s=age_s - 1)),
            worker("a/1", **in_call(loads, age_s=age_s - 1, cpu_s=1.0)),
            taken_at=100.0,
        )
        diagnosis = diagnose_run(now, before)
        assert diagnosis.is_healthy is is_healthy, (age_s, cpu_s, diagnosis)
        if not is_healthy:
            (finding,) = [each for each in diagnosis.findings if each.is_problem]
            assert finding.subject == "a/1"
            assert "data.py:88 (json.loads(line))" in finding.cause


def test_slow_call_is_a_note() -> None:
    frame = Frame("/home/me/train.py", 10, "step", "x = f(x)")
    other = Frame("/home/me/train.py", 20, "load", "y = g(y)")
    busy = worker("a/0", world_size=1, **in_call(frame, cpu_s=5.0))
    before = run(worker("a/0", world_size=1, **in_call(other, cpu_s=4.0)), taken_at=100.0)
    diagnosis = diagnose_run(run(busy), before)
    assert diagnosis.is_healthy
    assert [each.rule for each in diagnosis.findings] == ["slow call"]
    assert "note: a/0.step on a/0 has run for 100.0 s; the median is 1.0 s." in why_text(diagnosis)


@pytest.mark.parametrize(
    ("text", "file", "function", "kind"),
    [
        ("time.sleep(3)", "/home/me/a.py", "f", "sleep"),
        ("await asyncio.sleep(3)", "/home/me/a.py", "f", "sleep"),
        ("socket.getaddrinfo(host, 80)", "/home/me/a.py", "f", "name lookup"),
        ("requests.get(url)", "/home/me/a.py", "f", "connection"),
        ("self.lock.acquire()", "/home/me/a.py", "f", "lock"),
        ("with self._lock:", "/home/me/a.py", "f", "lock"),
        ("fcntl.flock(fd, fcntl.LOCK_EX)", "/home/me/a.py", "f", "lock"),
        ("x = self.queue.get()", "/home/me/a.py", "f", "message"),
        ("subprocess.run(command)", "/home/me/a.py", "f", "process"),
        ("dist.barrier()", "/home/me/a.py", "f", "collective"),
        ("torch.distributed.all_gather(out, x)", "/home/me/a.py", "f", "collective"),
        (
            "work.wait()",
            "/usr/lib/x/torch/distributed/distributed_c10d.py",
            "broadcast",
            "collective",
        ),
        ("data = file.read()", "/home/me/a.py", "f", "file"),
        ("x = x @ w", "/home/me/a.py", "f", None),
        ("return self.model(x)", "/home/me/a.py", "f", None),
        ("", "/home/me/a.py", "f", None),
    ],
)
def test_wait_of(text: str, file: str, function: str, kind: str | None) -> None:
    stack = StackTrace(thread="engine", frames=[Frame(file, 3, function, text)])
    wait = wait_of(stack)
    assert (wait.kind if wait is not None else None) == kind


def test_site_is_in_users_code() -> None:
    frames = [
        Frame("/home/me/train.py", 210, "step", "loss.backward()"),
        Frame("/usr/lib/python3/site-packages/torch/_tensor.py", 5, "backward"),
    ]
    site = site_of(StackTrace(thread="engine", frames=frames))
    assert site is not None
    assert place(site) == "train.py:210 (loss.backward())"


def test_named_joins_ranges() -> None:
    assert named(["a/0", "a/1", "a/2", "a/7", "b/3", "script"]) == "script, a/0-2, a/7, b/3"
    assert named(f"r{n}/0" for n in range(9)) == "r0/0, r1/0, r2/0, r3/0, r4/0, r5/0 and 3 more"
