"""Tests of `helmsman status`, `stacks`, `logs`, `trace`, `postmortem` and actions on real runs."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from helmsman import Job, LocalScheduler, RolloutController, SamplingParams, SchedulingSpec
from helmsman._cli import main
from helmsman.api.run_state import RunSnapshot
from tests.desk.staged import Answers, stale_samples
from tests.desk.staged_runs import Staged, end

JOB = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])


@pytest.fixture(scope="module")
def controller() -> Iterator[RolloutController]:
    with (
        LocalScheduler(preload=()) as scheduler,
        RolloutController(scheduler, Answers, JOB) as controller,
    ):
        scheduler.reporter.figure("step", "3 of 9")
        controller.generate([[1]] * 4, SamplingParams(max_new_tokens=4))
        yield controller


def run_id_of(controller: RolloutController) -> str:
    scheduler = controller.scheduler
    assert isinstance(scheduler, LocalScheduler)
    return scheduler.run_id


def test_status(controller: RolloutController, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = run_id_of(controller)
    with controller.scheduler.reporter.phase("evaluation", "held-out"):
        assert main(["status", run_id]) == 0
    text = capsys.readouterr().out
    assert f"run {run_id}  LocalScheduler" in text
    assert "step 3 of 9" in text
    assert "phase: evaluation held-out" in text
    assert "rollout/1  idle" in text
    assert "rollout: 0 queued, 0 in flight, 4 done" in text
    assert "instances: 2 healthy" in text
    assert main(["status", run_id[:6], "--json"]) == 0
    snapshot = msgspec.json.decode(capsys.readouterr().out, type=RunSnapshot)
    assert [each.worker_id for each in snapshot.workers] == ["rollout/0", "rollout/1"]
    assert snapshot.rollouts[0].num_done == 4


@pytest.mark.parametrize("blocked", ["", "rich"], ids=["rich", "plain"])
def test_status_watch_on_a_terminal(controller: RolloutController, blocked: str) -> None:
    """With rich, each state replaces the last one; without, it is appended."""
    source = "import sys; from helmsman._cli import main; "
    source += "main(['status', sys.argv[1], '--watch'])"
    if blocked:  # as if it were not installed
        source = "import importlib.util as u; u.find_spec = lambda name: None; " + source
    near, far = pty.openpty()
    command = [sys.executable, "-c", source, run_id_of(controller)]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=far, env=environment) as process:
        os.close(far)
        output = b""
        while output.count(b"rollout/1") < 3:
            output += os.read(near, 4096)
        process.send_signal(signal.SIGINT)
    os.close(near)
    assert (b"\x1b[?1049h" in output) == (not blocked)  # the alternate screen
    assert (b"\x1b" in output) == (not blocked)


def test_status_shows_samples_of_older_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalScheduler(preload=()) as scheduler, stale_samples(scheduler):
        assert main(["status", scheduler.run_id]) == 0
    text = capsys.readouterr().out
    assert "recent samples behind these weights: 1 by 0, 2 by 2 versions" in text


def test_why_of_idle_run(controller: RolloutController, capsys: pytest.CaptureFixture[str]) -> None:
    controller.generate([[1]], SamplingParams(max_new_tokens=4))  # the run has just become idle
    assert main(["why", run_id_of(controller)]) == 0
    text = capsys.readouterr().out
    assert "no problem found" in text
    assert "No call is open; the script " in text  # it sends the query, or waits for the answer
    assert main(["why", run_id_of(controller), "rollout", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_stacks(controller: RolloutController, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", run_id_of(controller)]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 workers (rollout/0-1) have no call" in text
    assert "script:\n  main" in text
    assert main(["stacks", run_id_of(controller), "rollout", "--all"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rollout/0:\nthread ")
    assert "rollout/1:\nthread " in text
    assert main(["stacks", run_id_of(controller), "script"]) == 0
    assert capsys.readouterr().out.startswith("script:\n  main")
    assert main(["stacks", run_id_of(controller), "absent"]) == 2
    assert "no role 'absent'" in capsys.readouterr().err


def test_logs(controller: RolloutController, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = run_id_of(controller)
    assert main(["logs", run_id]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[script] ")
    assert any(each.startswith("[rollout/1] ") and "is created" in each for each in lines)
    times = [each.split("] ", 1)[1][:23] for each in lines]
    assert times == sorted(times)
    assert main(["logs", run_id, "rollout/1", "-n", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[rollout/1] ")
    assert main(["logs", run_id, "absent"]) == 2
    assert "the run has logs of rollout/0, rollout/1, script" in capsys.readouterr().err


def test_drain_resume_scale_kill(
    controller: RolloutController, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id, requests = run_id_of(controller), controller.stats
    assert main(["drain", "rollout/0", "--run", run_id, "--yes"]) == 0
    assert requests().instances["rollout/0"].is_draining
    assert main(["resume", "rollout/0", "--run", run_id, "--yes"]) == 0
    assert not requests().instances["rollout/0"].is_draining
    assert main(["scale", "rollout", "3", "--run", run_id, "--yes"]) == 0
    assert "rollout/2" in requests().instances
    assert main(["kill", "rollout/2", "--run", run_id, "--yes"]) == 0
    assert "rollout/2 was killed" in capsys.readouterr().out
    status = {each.worker_id: each.state.value for each in controller.scheduler.status()}
    assert status["rollout/2"] == "failed"
    assert main(["kill", "rollout/9", "--run", run_id, "--yes"]) == 2
    assert "no worker 'rollout/9'" in capsys.readouterr().err
    log = (controller.scheduler.log_dir / "driver.log").read_text()
    for action in ("drain rollout/0", "resume rollout/0", "scale rollout to 3", "kill rollout/2"):
        assert f"operator: {action}\n" in log


def test_actions_ask_for_confirmation(
    controller: RolloutController,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "answers").write_text("no\n")
    with (tmp_path / "answers").open() as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        assert main(["drain", "rollout/1", "--run", run_id_of(controller)]) == 1
    assert "drain rollout/1 of run" in capsys.readouterr().out
    assert not controller.stats().instances["rollout/1"].is_draining


def test_stop(stage: Callable[[str], Staged], capsys: pytest.CaptureFixture[str]) -> None:
    staged = stage("stuck_reward")
    assert main(["stop", staged.run_id, "--yes"]) == 0
    assert "has ended after SIGINT" in capsys.readouterr().out
    assert staged.process.wait(30) != 0
    assert main(["status", staged.run_id]) == 2


ENDS = {
    "raises": "raise ValueError('reward is NaN at step 17')",
    "exits": "sys.exit(5)",
    "other closes": "other = make(sys.argv[1] + '/other')\n"
    "    other.close()\n"
    "    os.kill(os.getpid(), signal.SIGKILL)",
    "worker prints": "scheduler.create_engines(['main/0'], Talks)\n"
    "    scheduler.call_engine('main/0', 'talk')\n"
    "    os.kill(os.getpid(), signal.SIGKILL)",
    "closes": "pass",
}
"""The last lines of a script, by its end."""
RUNS = """
import os, signal, sys
from helmsman import Job, LocalScheduler

class Talks:
    def talk(self):
        print("INFO run eager-fox-12 is closed", flush=True)

def make(log_dir):
    scheduler = LocalScheduler(log_dir=log_dir, preload=())
    scheduler.create_workers(Job(role=os.path.basename(log_dir)))
    return scheduler

with make(sys.argv[1] + "/main") as scheduler:
    """


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("raises", "after an exception in the script: ValueError: reward is NaN at step 17"),
        ("exits", "after an exception in the script: SystemExit: 5"),
        ("other closes", "No process reported its end: the script's process was killed"),
        ("worker prints", "without being closed"),
        ("closes", "The run was closed normally"),
    ],
)
def test_postmortem_names_end_of_script(
    ends: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", RUNS + ENDS[ends], str(tmp_path)]
    subprocess.run(command, env=env, capture_output=True, timeout=100, check=False)
    assert main(["postmortem", str(tmp_path / "main")]) == (0 if ends == "closes" else 1)
    text, err = capsys.readouterr()
    assert expected in text
    assert ("closed normally" in text) == (ends == "closes")
    assert "scp" not in err


def test_postmortem_of_live_run(
    controller: RolloutController, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["postmortem", run_id_of(controller)]) == 1
    text = capsys.readouterr().out
    assert "The run is alive; this is its last minute." in text
    assert "without being closed" not in text
    assert "was killed" not in text


def test_written_files_are_private(
    controller: RolloutController, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = run_id_of(controller)
    for command in ("trace", "report"):
        out = tmp_path / command
        assert main([command, run_id, "-o", str(out)]) in (0, None)
        assert out.stat().st_mode & 0o077 == 0
        assert main([command, run_id, "-o", str(tmp_path / "none" / "out")]) == 2
        assert "cannot be written: [Errno 2]" in capsys.readouterr().err


def test_actions_on_a_stopped_script(
    stage: Callable[[str], Staged], capsys: pytest.CaptureFixture[str]
) -> None:
    """An action is refused at once; stop lets the process continue and end."""
    staged = stage("stopped_script")
    os.waitid(os.P_PID, staged.process.pid, os.WSTOPPED | os.WNOWAIT)
    status = ["status", staged.run_id]
    while main(status) == 0:  # until its interpreter counts as stuck
        continue
    capsys.readouterr()
    assert main(["drain", "actor/0", "--run", staged.run_id, "--yes"]) == 2
    text = capsys.readouterr().err
    assert f"cannot drain: its script, pid {staged.process.pid}, has not run Python" in text
    assert main(["stop", staged.run_id, "--yes"]) == 0
    assert "has ended after SIGINT" in capsys.readouterr().out


def test_run_whose_log_directory_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor"))
        shutil.rmtree(tmp_path / "logs")
        assert main(["logs", scheduler.run_id]) == 2
    assert "was removed: " in capsys.readouterr().err


def test_killed_run_leaves_trace_postmortem_and_logs(
    stage: Callable[[str], Staged], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands need only a copy of its directory."""
    staged = stage("straggler")
    assert main(["status", staged.run_id, "--json"]) == 0
    snapshot = msgspec.json.decode(capsys.readouterr().out, type=RunSnapshot)
    for worker in snapshot.workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)  # no worker reports the end of the script
    end(staged.process)
    copy = tmp_path / "elsewhere"
    shutil.copytree(snapshot.log_dir, copy)
    assert main(["postmortem", str(copy)]) == 1
    text = capsys.readouterr().out
    assert "without being closed" in text
    assert "No process reported its end" in text
    assert "rollout/1: agenerate for" in text or "rollout/0: agenerate for" in text
    assert re.search(r"Generation requests open at the end: [12]\n", text)
    assert main(["logs", str(copy), "script"]) == 0
    assert "create_workers of rollout took" in capsys.readouterr().out
    out = tmp_path / "run.perfetto-trace"
    assert main(["trace", str(copy), "-o", str(out)]) == 0
    events = json.loads(out.read_bytes())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    assert {"agenerate", "create_workers rollout", "initialize"} <= {e["name"] for e in slices}
    assert [e for e in slices if e["args"].get("unfinished") and e["cat"] == "call"]
    begins = {each["id"] for each in events if each["ph"] == "s"}
    ends = {each["id"] for each in events if each["ph"] == "f"}
    assert ends <= begins


def test_recordings_of_another_node_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    with LocalScheduler(log_dir=logs, preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor", replicas=3))
    commands = [["trace", str(logs), "-o", str(tmp_path / "out")], ["postmortem", str(logs)]]
    commands += [["logs", str(logs)], ["report", str(logs), "-o", str(tmp_path / "run.html")]]
    for command in commands:
        assert main(command) == 0
        assert capsys.readouterr().err == ""
    for path in [*logs.glob("actor-1.*"), *logs.glob("actor-2.*")]:
        path.unlink()  # as if another node had them
    story = logs / "driver.log"
    story.write_text(story.read_text().replace("127.0.0.1", "10.0.0.9"))
    for command in commands:
        assert main(command) == 0
        text = capsys.readouterr().err
        assert "without the recordings of actor/1-2, which are on node 10.0.0.9" in text
        assert f"scp '10.0.0.9:{logs}/" in text


@pytest.mark.root
def test_why_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        with LocalScheduler(log_dir=disk / "logs", preload=()) as scheduler:
            scheduler.create_workers(Job(role="actor"))
            free = shutil.disk_usage(disk).free
            (disk / "filler").write_bytes(bytes(free))
            assert main(["why", scheduler.run_id]) == 1
        text = capsys.readouterr().out
        assert f"disk full: {disk / 'logs'} on " in text
        assert "is full: 0 MiB of 16 MiB are free." in text
        assert "1 problem" in text
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
