"""Test the displays of a run: plain lines, a live page on a terminal, and the final picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from rich.console import Console

from examples.common.record import Record, draw, summarize
from examples.common.settings import Settings
from examples.common.view import LiveView, View
from helmsman import Scheduler
from helmsman.api.scheduler import WorkerHealth, WorkerState, WorkerStatus


def records(sft_steps: int, steps: int) -> list[Record]:
    every = [Record(step=0, phase="eval", held_out_accuracy=0.0)]
    every += [Record(step=step, phase="sft", loss=1.0) for step in range(1, sft_steps + 1)]
    for step in range(sft_steps + 1, sft_steps + steps + 1):
        every.append(
            Record(
                step=step,
                phase="grpo",
                reward=0.4,
                accuracy=0.35,
                tokens=10,
                tokens_per_s=5.0,
                weight_version=step,
            )
        )
    every[sft_steps].held_out_accuracy = 0.25
    every[-1].held_out_accuracy = 0.875
    return every


@pytest.mark.parametrize(("sft_steps", "steps"), [(3, 5), (0, 5), (3, 0), (0, 0)])
def test_draw_curve_every_mix_of_phases(tmp_path: Path, sft_steps: int, steps: int) -> None:
    pytest.importorskip("matplotlib")
    every = records(sft_steps, steps)
    path = tmp_path / "curve.png"

    draw(
        every,
        path,
        summarize(every, Settings(sft_steps=sft_steps, steps=steps), "task", seconds=1.0),
    )

    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_view_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = View(40)
    for record in records(3, 20):
        view.show(record)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["0/40", "3/40", "10/40", "20/40", "23/40"]
    assert lines[-1].split("  ")[-1] == "weights v23"
    assert "reward 0.400  accuracy 35.0%  held-out accuracy 87.5%" in lines[-1]


@pytest.fixture
def page() -> Iterator[tuple[LiveView, Console]]:
    health = WorkerHealth(
        worker_id="train/0",
        pid=42,
        node="here",
        engines={},
        running="train/0.train_batch",
        running_s=1.5,
        rss_bytes=300_000_000,
    )
    scheduler = create_autospec(Scheduler, instance=True)
    scheduler.status.return_value = [
        WorkerStatus(
            worker_id="train/0",
            state=WorkerState.READY,
            node="here",
            pid=42,
            log_path="",
            health=health,
        ),
        WorkerStatus(
            worker_id="rollout/0",
            state=WorkerState.FAILED,
            node="there",
            pid=43,
            log_path="",
            health=None,
        ),
    ]
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    view = LiveView(8, "GRPO", scheduler, console)
    view.open()
    yield view, console
    view.close()


def test_live_view_page(page: tuple[LiveView, Console]) -> None:
    view, console = page
    for record in records(3, 5):
        view.show(record)
    view.poll()
    view.close()

    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().rpartition("GRPO ──")[2]
    for text in (
        "step 8 of 8",
        "0.400",
        "35.0%",
        "87.5%",
        "train_batch for 1.5 s",
        "300 MB",
        "rollout/0",
        "failed",
        "there",
    ):
        assert text in shown, shown
