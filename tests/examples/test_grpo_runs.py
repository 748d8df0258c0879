"""examples/grpo.py as its user runs it: the same losses on every scheduler, and an end at any time
that can be gone on from.
"""

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

from examples.grpo import main
from helmsman.testing import Hang, Kill, Slow
from tests.recipes.processes import marked, pids_of, run_here, wait_for

ROOT = Path(__file__).parents[2]
SMALL = (
    "--sft-steps",
    "12",
    "--sft-batch",
    "32",
    "--prompts-per-step",
    "8",
    "--samples-per-prompt",
    "4",
)
HELD_OUT = ("--num-held-out", "12")
GREEDY = ("--steps", "8", "--temperature", "0")
SAMPLED = ("--steps", "6")
FAULTS = msgspec.json.encode(
    [
        Kill("rollout/0", at_step=14),
        Hang("rollout/1", at_step=15, seconds=1),
        Slow("rollout/1", at_step=16, factor=3, seconds=2),
    ]
).decode()
MEASURED = ("loss", "reward", "accuracy")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of two digits: a new model gets some right by chance, so there are rewards to learn from
    at once.
    """
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [
        json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)})
        for a in range(10)
        for b in range(10)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def unbroken(
    sums: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Records of synchronous runs of one rank in which nothing happens: greedy, and with sampled
    answers.
    """
    folder = tmp_path_factory.mktemp("unbroken")
    runs = {"greedy": GREEDY, "sampled": SAMPLED}
    for name, flags in runs.items():
        assert run_here(main, flags_of(sums, folder / name, "--scheduler", "inline", *flags)) == 0
    return {name: records(folder / name) for name in runs}


def flags_of(data: Path, out: Path, *flags: str) -> list[str]:
    return ["--data", str(data), "--out", str(out), *SMALL, *HELD_OUT, *flags]


def begin(data: Path, out: Path, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """Start the script in a process of its own."""
    command = [sys.executable, str(ROOT / "examples" / "grpo.py"), *flags_of(data, out, *flags)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def num_lines(out: Path) -> int:
    try:
        return len((out / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def kill_at(process: subprocess.Popen[str], out: Path, role: str, steps: tuple[int, ...]) -> int:
    """Kill a worker of a role after each of these steps, wait for the run's end, and return how
    many were killed.
    """
    killed: list[int] = []
    try:
        for at in steps:
            wait_for(lambda at=at: num_lines(out) > at or process.poll() is not None, 120)  # type: ignore[misc]
            wait_for(
                lambda: set(pids_of(role, out)) - set(killed) or process.poll() is not None, 60
            )
            if process.poll() is None:
                killed.append(pids_of(role, out)[-1])
                os.kill(killed[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return len(killed)


@pytest.mark.parametrize(
    "flags",
    [("--scheduler", "ray"), ("--scheduler", "local", "--faults", FAULTS)],
    ids=["ray", "drill"],
)
def test_grpo_same_losses(
    sums: Path, tmp_path: Path, unbroken: dict[str, list[dict[str, Any]]], flags: tuple[str, ...]
) -> None:
    """Within 2e-4: the arithmetic is the same, but the order in which floats are summed depends on
    which prompts share a batch and on how many ranks share a step, and each step carries a rounding
    of 1e-7 on, amplified by Adam near a gradient of 0.
    """
    process = begin(sums, tmp_path / "out", *flags, *SAMPLED)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    found, expected = records(tmp_path / "out"), unbroken["sampled"]
    assert any(
        record["reward"] not in (0.0, 1.0) for record in expected if record["phase"] == "grpo"
    ), "nothing to learn from"
    assert [record["step"] for record in found] == list(range(19))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), (ours, theirs)
        assert ours["reward"] == theirs["reward"], (ours, theirs)
        assert ours["weight_version"] == theirs["weight_version"], (ours, theirs)


@pytest.mark.parametrize("scheduler", ["ray", "inline"])
def test_grpo_interrupted_and_resumed(scheduler: str, sums: Path, tmp_path: Path) -> None:
    out, mark = tmp_path / "run", f"interrupted-{os.getpid()}-{scheduler}"
    flags = ("--save-every", "2", "--eval-every", "1000", "--scheduler")
    process = begin(
        sums,
        out,
        *flags,
        scheduler,
        "--steps",
        "100000",
        env={**os.environ, "MARK": mark},
        start_new_session=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or num_lines(out) > 18, 120.0)
        assert process.poll() is None, process.stdout and process.stdout.read()
        # all processes of its group get it, as of a terminal's Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=10.0)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "--resume" in said
    wait_for(lambda: not marked(mark), 1.0)
    assert marked(mark) == []
    assert list(Path(tempfile.gettempdir()).glob(f"helmsman-*/**/*{mark}*")) == []

    last = max(record["step"] for record in records(out)) + 3
    assert (
        run_here(main, flags_of(sums, out, *flags, "inline", "--steps", str(last - 12), "--resume"))
        == 0
    )
    assert [record["step"] for record in records(out)] == list(range(last + 1))


def test_grpo_rollout_workers_killed(sums: Path, tmp_path: Path) -> None:
    """One is killed every few steps of an asynchronous run; every step is trained, and every prompt
    near its step.
    """
    out, most_late = tmp_path / "out", 2
    process = begin(
        sums, out, "--scheduler", "local", "--steps", "12", "--async", "--staleness", "1.5"
    )
    assert kill_at(process, out, "rollout", (13, 17, 21)) >= 2
    assert [record["step"] for record in records(out)] == list(range(25))
    trained = [record["draws"] for record in records(out) if record["phase"] == "grpo"]
    num_prompts = len(trained[0])
    late = {
        draw: step - draw // num_prompts for step, draws in enumerate(trained) for draw in draws
    }
    assert len(late) == num_prompts * len(trained), "none twice"
    assert all(-most_late <= by <= most_late for by in late.values())
    lost = set(range((len(trained) - most_late) * num_prompts)).difference(late)
    assert not lost


@pytest.mark.parametrize(
    "flags", [(), ("--async", "--staleness", "0")], ids=["synchronous", "asynchronous"]
)
def test_grpo_train_workers_killed(
    sums: Path, tmp_path: Path, unbroken: dict[str, list[dict[str, Any]]], flags: tuple[str, ...]
) -> None:
    """One of two is killed in each phase; every step is recorded once, in order, and does what it
    does without a loss.
    """
    out = tmp_path / "out"
    process = begin(
        sums,
        out,
        "--scheduler",
        "local",
        *GREEDY,
        "--save-every",
        "5",
        *flags,
        "--train-workers",
        "2",
    )
    assert kill_at(process, out, "train", (7, 16)) == 2
    found = records(out)
    assert [record["step"] for record in found] == list(range(21))
    versions = [record["weight_version"] for record in found]
    assert versions == sorted(set(versions))
    assert versions[-1] > 20, "the versions of the steps that were lost are not given again"
    for ours, theirs in zip(found, unbroken["greedy"], strict=True):
        for name in MEASURED:
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4, nan_ok=True), (
                name,
                ours,
                theirs,
            )
