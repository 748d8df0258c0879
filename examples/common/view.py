"""Displays of a run: a live page on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.common.record import Record
from examples.common.settings import Settings
from helmsman import HelmsmanError, Scheduler
from helmsman.api.scheduler import WorkerState, WorkerStatus

_POLL_S = 1.0
_LINE_EVERY = 10
_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    WorkerState.READY: "green",
    WorkerState.FAILED: "bold red",
    WorkerState.OVERDUE: "yellow",
}


class View:
    """Shows notes and records as plain lines; the base of the live page."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def note(self, text: str) -> None:
        """Show a note."""
        self._print(text)

    def show(self, record: Record) -> None:
        """Show the record of a step that has ended."""
        if record.step % _LINE_EVERY == 0 or record.held_out_accuracy is not None:
            self._print(_line(record, self._total_steps))

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class LiveView(View):
    """A page that is redrawn in place: progress, the latest figures, and the current call of each
    worker.

    A thread polls the scheduler for the workers' state once a second; the run does not wait for it.
    """

    def __init__(
        self, total_steps: int, title: str, scheduler: Scheduler, console: Console
    ) -> None:
        super().__init__(total_steps)
        self._title = title
        self._scheduler = scheduler
        self._record: Record | None = None
        self._held_out: list[float] = []
        self._note = ""
        self._status: list[WorkerStatus] = []
        self._started = time.monotonic()
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._keep_polling, name="view-status", daemon=True)
        self._live = Live(
            console=console, get_renderable=self._page, refresh_per_second=4, transient=False
        )

    def open(self) -> None:
        """Begin to draw and to poll."""
        self._live.start()
        self._poller.start()

    def close(self) -> None:
        """Stop polling and leave the last page on the screen."""
        self._closing.set()
        self._poller.join(timeout=2.0)
        with contextlib.suppress(OSError):  # the terminal has closed
            self._live.stop()

    def note(self, text: str) -> None:
        self._note = text

    def show(self, record: Record) -> None:
        self._record, self._note = record, ""
        if record.held_out_accuracy is not None:
            self._held_out.append(record.held_out_accuracy)

    def poll(self) -> None:
        """Poll the scheduler for the state of every worker."""
        with contextlib.suppress(HelmsmanError):
            # The scheduler closes; the page keeps the last state.
            self._status = self._scheduler.status()

    def _keep_polling(self) -> None:
        while not self._closing.wait(_POLL_S):
            self.poll()
        self.poll()  # the last page shows the end of the run

    def _page(self) -> RenderableType:
        return Panel(
            Group(self._progress(), self._figures(), self._workers()),
            title=self._title,
            border_style="blue",
        )

    def _progress(self) -> RenderableType:
        step = self._record.step if self._record else 0
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(1, self._total_steps), completed=step)
        row.add_row(bar, f"step {step} of {self._total_steps}   {minutes}:{seconds:02d}")
        return row

    def _figures(self) -> RenderableType:
        record = self._record
        table = Table.grid(expand=True, padding=(0, 2))
        names = (
            "phase",
            "loss",
            "reward",
            "accuracy",
            "held-out accuracy",
            "tokens/s",
            "weight version",
        )
        for _ in names:
            table.add_column(justify="center")
        table.add_row(*(Text(name, style="dim") for name in names))
        if record is not None:
            held_out = (
                f"{_percent(self._held_out[-1])} {_sparkline(self._held_out)}"
                if self._held_out
                else "-"
            )
            table.add_row(
                {"eval": "before training", "sft": "supervised", "grpo": "GRPO"}[record.phase],
                _number(record.loss),
                _number(record.reward),
                _percent(record.accuracy),
                Text(held_out, style="bold green"),
                f"{record.tokens_per_s:,.0f}",
                str(record.weight_version),
            )
        return Group(table, Text(self._note, style="italic dim"))

    def _workers(self) -> RenderableType:
        table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
        for name in ("worker", "state", "doing", "calls", "pid", "CPU s", "memory", "node"):
            table.add_column(
                name,
                justify="right" if name in ("calls", "pid", "CPU s", "memory") else "left",
                no_wrap=True,
            )
        for status in self._status:
            health = status.health
            state = Text(status.state.value, style=_STATE_STYLES.get(status.state, ""))
            if health is None:
                table.add_row(
                    status.worker_id, state, "-", "-", str(status.pid or "-"), "-", "-", status.node
                )
                continue
            table.add_row(
                status.worker_id,
                state,
                _doing(status),
                f"{health.num_calls:,}",
                str(health.pid),
                f"{health.cpu_s:.0f}",
                f"{health.rss_bytes / 1e6:,.0f} MB",
                status.node,
            )
        return table


@contextlib.contextmanager
def open_view(settings: Settings, scheduler: Scheduler) -> Iterator[View]:
    """Open the live page if standard output is a terminal, else plain lines."""
    console = Console()
    if not console.is_terminal:
        yield View(settings.total_steps)
        return
    title = f"GRPO on {settings.data or settings.task} - {settings.scheduler}"
    view = LiveView(settings.total_steps, title, scheduler, console)
    view.open()
    try:
        yield view
    finally:
        view.close()


def _doing(status: WorkerStatus) -> str:
    assert status.health is not None
    if status.health.running:
        return (
            f"{status.health.running.rpartition('.')[2]} for {status.health.running_s or 0.0:.1f} s"
        )
    waiting = {
        name.rpartition(".")[2]: count
        for name, count in status.health.async_running.items()
        if count
    }
    return ", ".join(f"{name} x{count}" for name, count in waiting.items()) or "idle"


def _line(record: Record, total_steps: int) -> str:
    parts = [f"step {record.step:4d}/{total_steps}  {record.phase:4s}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:7.4f}")
    if record.reward is not None:
        parts.append(f"reward {record.reward:.3f}  accuracy {_percent(record.accuracy)}")
    if record.held_out_accuracy is not None:
        parts.append(f"held-out accuracy {_percent(record.held_out_accuracy)}")
    if record.tokens:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    parts.append(f"weights v{record.weight_version}")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _sparkline(values: list[float]) -> str:
    return "".join(_BARS[min(len(_BARS) - 1, int(value * len(_BARS)))] for value in values[-16:])
