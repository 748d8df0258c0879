"""The example as its user runs it: the same losses on every scheduler, and an end at any time that can be gone on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.testing import Hang, Kill, Slow
from tests.examples.processes import marked, pids_of, wait_for

ROOT = Path(__file__).parents[2]
SMALL = [
    "--sft-steps",
    "12",
    "--sft-batch",
    "32",
    "--prompts-per-step",
    "8",
    "--samples-per-prompt",
    "4",
    "--num-held-out",
    "12",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


GREEDY = ("--scheduler", "local", "--steps", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of two digits: a new model gets some right by chance, so there are rewards to learn from at once."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)}) for a in range(10) for b in range(10)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def unbroken(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of a synchronous run in which nothing happens."""
    return run(sums, tmp_path_factory.mktemp("unbroken"), *GREEDY)


def command(data: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / "grpo.py"), "--data", str(data), "--out", str(out), *SMALL, *flags]


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run(data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    ran = subprocess.run(command(data, out, *flags), capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return records(out)


def test_schedulers_and_ranks_give_the_same_losses(sums: Path, tmp_path: Path) -> None:
    """Within 2e-4: the arithmetic is the same, but the order in which floats are summed depends on which prompts share a batch
    and on how many ranks share a step, and each step carries a rounding of 1e-7 on, amplified by Adam near a gradient of 0.
    """
    runs = {
        "inline": run(sums, tmp_path / "inline", "--scheduler", "inline", "--steps", "4"),
        "local": run(sums, tmp_path / "local", "--scheduler", "local", "--steps", "4"),
        "two ranks": run(sums, tmp_path / "two", "--scheduler", "local", "--steps", "4", "--train-workers", "2"),
        "ray": run(sums, tmp_path / "ray", "--scheduler", "ray", "--steps", "4"),
    }
    expected = runs.pop("inline")
    grpo = [record for record in expected if record["phase"] == "grpo"]
    assert len(grpo) == 4
    assert any(record["reward"] not in (0.0, 1.0) for record in grpo), "no step had anything to learn from"
    for name, found in runs.items():
        assert [record["step"] for record in found] == [record["step"] for record in expected], name
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), (name, ours, theirs)
            assert ours["reward"] == theirs["reward"], (name, ours, theirs)
            assert ours["weight_version"] == theirs["weight_version"], (name, ours, theirs)


@pytest.mark.parametrize(
    ("scheduler", "number"), [("local", signal.SIGINT), ("ray", signal.SIGTERM), ("inline", signal.SIGTERM)]
)
def test_an_interrupted_run_ends_at_once_and_goes_on(scheduler: str, number: int, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--scheduler", scheduler, "--save-every", "2", "--eval-every", "1000"]
    mark = f"interrupted-{os.getpid()}-{scheduler}"
    process = subprocess.Popen(
        command(sums, out, *flags, "--steps", "100000"),
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or num_lines(out) > 18, 120.0)
        assert process.poll() is None, process.stdout and process.stdout.read()
        os.killpg(process.pid, number)  # as a terminal's Ctrl-C, which all processes of its group get
        said, _ = process.communicate(timeout=10.0)
    finally:
        process.kill()
    assert process.returncode == 128 + number, said
    assert "--resume" in said
    wait_for(lambda: not marked(mark), 1.0)
    assert marked(mark) == []
    assert list(Path(tempfile.gettempdir()).glob(f"helmsman-*/**/*{mark}*")) == []

    done = max(record["step"] for record in records(out))
    run_to = done + 3 - 12
    ran = subprocess.run(
        [*command(sums, out, *flags, "--steps", str(run_to), "--resume")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = [record["step"] for record in records(out)]
    assert steps == list(range(12 + run_to + 1))


@pytest.mark.parametrize(("flags", "most_late"), [((), 0), (("--async", "--staleness", "1.5"), 2)])
def test_rollout_workers_that_die_do_not_end_the_run(
    sums: Path, tmp_path: Path, flags: tuple[str, ...], most_late: int
) -> None:
    """One is killed every few steps; every step is trained, and every prompt at its step or, asynchronously, near it."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(sums, out, "--scheduler", "local", "--steps", "12", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    num_killed = 0
    try:
        for at in (13, 17, 21):
            wait_for(lambda at=at: num_lines(out) > at or process.poll() is not None, 120)  # type: ignore[misc]
            wait_for(lambda: len(pids_of("rollout", out)) >= 1 or process.poll() is not None, 60)
            if process.poll() is None:
                os.kill(pids_of("rollout", out)[0], signal.SIGKILL)
                num_killed += 1
        told, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert num_killed >= 2
    assert [record["step"] for record in records(out)] == list(range(25))
    trained = [record["draws"] for record in records(out) if record["phase"] == "grpo"]
    num_prompts = len(trained[0])
    late = {draw: step - draw // num_prompts for step, draws in enumerate(trained) for draw in draws}
    assert len(late) == num_prompts * len(trained), "none twice"
    assert all(-most_late <= by <= most_late for by in late.values())
    lost = set(range((len(trained) - most_late) * num_prompts)).difference(late)
    assert not lost


def test_a_drill_does_not_change_what_is_trained(sums: Path, tmp_path: Path) -> None:
    plan = [
        Kill("rollout/0", at_step=14),
        Hang("rollout/1", at_step=15, seconds=1),
        Slow("rollout/1", at_step=16, factor=3, seconds=2),
    ]
    faults = msgspec.json.encode(plan).decode()
    flags = ("--scheduler", "local", "--steps", "6")
    quiet, drilled = run(sums, tmp_path / "quiet", *flags), run(sums, tmp_path / "drill", *flags, "--faults", faults)
    assert [record["step"] for record in drilled] == list(range(19))
    for ours, theirs in zip(drilled, quiet, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), (ours, theirs)
        assert ours["reward"] == theirs["reward"], (ours, theirs)


@pytest.mark.parametrize("flags", [(), ("--async", "--staleness", "0")])
def test_train_workers_that_die_do_not_end_the_run(
    sums: Path, tmp_path: Path, unbroken: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    """One is killed in each phase; every step is recorded once, in order, and does what it does in a run without a loss."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(sums, out, *GREEDY, "--save-every", "5", *flags, "--train-workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed: list[int] = []
    try:
        for at in (7, 16):
            wait_for(lambda at=at: num_lines(out) > at or process.poll() is not None, 120)  # type: ignore[misc]
            wait_for(lambda: set(pids_of("train", out)) - set(killed) or process.poll() is not None, 60)
            if process.poll() is None:
                killed.append(pids_of("train", out)[-1])
                os.kill(killed[-1], signal.SIGKILL)
        told, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert len(killed) == 2
    found = records(out)
    assert [record["step"] for record in found] == list(range(21))
    versions = [record["weight_version"] for record in found]
    assert versions == sorted(set(versions))
    assert versions[-1] > 20, "the versions of the steps that were lost are not given again"
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), (ours, theirs)


def test_an_asynchronous_run_draws_the_same_tasks(sums: Path, tmp_path: Path, unbroken: list[dict[str, Any]]) -> None:
    ahead = run(sums, tmp_path / "async", *GREEDY, "--staleness", "0")
    keys = ("loss", "reward", "accuracy")
    assert [[record[key] for key in keys] for record in ahead] == [
        pytest.approx([record[key] for key in keys], abs=2e-4, nan_ok=True) if record["phase"] != "eval" else [None] * 3
        for record in unbroken
    ]


def num_lines(out: Path) -> int:
    try:
        return len((out / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0
