"""The commands that look into a run and act on it: `helmsman status`, `why`, `drain`, ..."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman._desk import logs, metrics, runs, ui
from helmsman._desk.control_socket import Query
from helmsman._desk.outside import is_stuck
from helmsman._desk.postmortem import postmortem
from helmsman._desk.recordings import write_trace
from helmsman._desk.runs import FoundRun, RunNotFoundError, find_run
from helmsman._desk.texts import stacks_text, status_text, why_text
from helmsman.api.errors import HelmsmanError

T = TypeVar("T")

OK, NO = 0, 1
_WATCH_S = 1.0
_LINE_BYTES = 1000


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    for name, (run, arguments, defaults) in _COMMANDS.items():
        text = _ACTIONS.get(name, run.__doc__ or "")
        command = commands.add_parser(name, help=text[:1].lower() + text[1:].rstrip("."))
        for each in arguments.split():
            names, options = _ARGUMENTS[each]
            command.add_argument(*names, **options)
        command.set_defaults(run=run, action=name, **defaults)


def _status(options: argparse.Namespace) -> int:
    """Show a run: its verdict, step, workers, calls, requests and weight versions."""
    earlier = None
    with _screen(options.watch) as show:
        while True:
            snapshot, diagnosis = _take(options, runs.judge)[0]
            text = as_json(snapshot) if options.json else status_text(snapshot, diagnosis, earlier)
            show(text)
            if not options.watch:
                return OK if diagnosis.is_healthy else NO
            time.sleep(_WATCH_S)
            earlier = snapshot


@contextlib.contextmanager
def _screen(is_whole: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text in place of the one before, or below it without rich."""
    if not is_whole or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield functools.partial(print, flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)


def _logs(options: argparse.Namespace) -> None:
    """Show the logs of a run, of its script and all workers, in the order of time."""

    def show(source: str, line: str) -> None:
        colour = logs.COLOURS[sum(source.encode()) % len(logs.COLOURS)]
        source = f"\x1b[{colour}m[{source}]\x1b[0m" if sys.stdout.isatty() else f"[{source}]"
        print(source, line, flush=options.follow)

    found: Iterable[logs.Line]
    if options.address:
        found = logs.merge(_take(options, _read_last, options.chosen, options.lines, alive=False))
        others = " on any node"
    else:
        run = _find_recorded(options)
        if options.follow:
            for source, line in logs.follow(run.log_dir, options.chosen, options.lines):
                show(source, line)
        found = _read(run, options.chosen, options.lines)
        known = ", ".join(sorted(logs.find_logs(run.log_dir)))
        others = f"; the run has logs of {known or 'no worker'}"
    if options.lines:
        found = collections.deque(found, abs(options.lines))
    is_empty = True
    for _, source, line in found:
        is_empty = False
        show(source, line)
    if is_empty:
        raise RunNotFoundError(
            f"there is no log of {options.chosen or 'any worker'}{others}. `helmsman status` lists "
            "the workers"
        )


def _read(run: FoundRun, chosen: str | None, num_lines: int) -> Iterator[logs.Line]:
    most_bytes = max(logs.MOST_BYTES, num_lines * _LINE_BYTES) if num_lines else None
    return logs.read_lines(run.log_dir, chosen, most_bytes)


def _read_last(run: FoundRun, chosen: str | None, num_lines: int) -> list[logs.Line]:
    return list(collections.deque(_read(run, chosen, num_lines), num_lines or None))


def _stacks(options: argparse.Namespace) -> None:
    """Show the Python stacks of a run's processes, equal ones together."""
    if options.all:
        query = Query(kind="stacks", role=options.role, limit_s=runs.ANSWER_S)
        for worker_id, text in _take(options, runs.ask_run, query, dict[str, str])[0].items():
            print(f"{worker_id}:\n{text}\n")
    else:
        print(stacks_text(_take(options, runs.take_snapshot, options.role, True)[0]))


def _why(options: argparse.Namespace) -> int:
    """Explain why a run hangs, or what it waits for; exit code 1 for a problem."""
    ((_, diagnosis),) = _take(options, runs.judge, options.role)
    print(as_json(diagnosis) if options.json else why_text(diagnosis))
    return OK if diagnosis.is_healthy else NO


def _take(
    options: argparse.Namespace, take: Callable[..., T], *arguments: Any, alive: bool = True
) -> list[T]:
    """Return ``take(run, *arguments)`` of the run here, or on the nodes of the cluster."""
    if not options.address:
        return [take(find_run(options.run_id, alive=alive), *arguments)]
    nodes, run_id = runs.attach(options.address), options.run_id
    answers = runs.on_all(nodes, runs.take_here, take, run_id, alive, *arguments)
    if found := [each for each in answers if each is not None]:
        return found
    raise RunNotFoundError(
        f"no run {run_id or 'that is alive'} of this user on the nodes of the cluster."
    )


def _find_recorded(options: argparse.Namespace) -> FoundRun:
    run = find_run(options.run_id)
    try:
        os.listdir(run.log_dir)
    except FileNotFoundError as error:
        text = f"the log directory of run {run.run_id} was removed: {run.log_dir}."
        raise RunNotFoundError(text) from error
    for each in [*logs.fetch_files(run), *logs.list_unread(run.log_dir)]:
        print(f"helmsman: {each}", file=sys.stderr)
    return run


def _trace(options: argparse.Namespace) -> None:
    """Write the recent calls, phases and requests of a run for ui.perfetto.dev."""
    run = _find_recorded(options)
    with _reported("the trace cannot be written"):
        num_events = write_trace(run.log_dir, Path(options.out))
    print(f"{options.out}: {num_events} events of run {run.run_id}; open it at ui.perfetto.dev")


def _postmortem(options: argparse.Namespace) -> int:
    """Show the last minute of a run that has ended, the first cause first."""
    run = _find_recorded(options)
    if run.is_alive:
        print(f"run {run.run_id} is alive; helmsman why {run.run_id} explains what it waits for")
    text, is_closed = postmortem(run.log_dir, is_alive=run.is_alive)
    print(text)
    return OK if is_closed else NO


def _report(options: argparse.Namespace) -> None:
    """Write the page about a run, alive or ended, to a file."""
    run = _find_recorded(options)
    with _reported("the page cannot be written"):
        ui.write_report(run, Path(options.out))
    print(f"{options.out}: run {run.run_id}")


def _ui(options: argparse.Namespace) -> None:
    """Serve a web page about a run on this machine: timeline, workers, stacks, logs."""
    run = find_run(options.run_id)
    with _reported(f"the page cannot be served at 127.0.0.1:{options.port}"):
        server = ui.Server(run.run_id, options.port)
    print(server.url, flush=True)
    with server:
        server.serve_forever()


def _metrics(options: argparse.Namespace) -> None:
    """Serve a run's metrics for Prometheus."""
    run = find_run(options.run_id, alive=True)
    with _reported(f"the metrics cannot be served at {options.host}:{options.port}"):
        metrics.serve(run, options.host, options.port)


@contextlib.contextmanager
def _reported(failure: str) -> Iterator[None]:
    """Report a failure of the system; files that are made meanwhile are private."""
    before = os.umask(0o077)
    try:
        yield
    except (OSError, OverflowError) as error:
        raise HelmsmanError(f"{failure}: {error}") from error
    finally:
        os.umask(before)


def _act(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)
    number = getattr(options, "number", 0)
    text = f"{options.action} {options.target}" + (f" to {number}" if number else "")
    if not _confirm(options, f"{text} of run {run.run_id}"):
        return NO
    if is_stuck(run.record):
        raise HelmsmanError(
            f"run {run.run_id} cannot {options.action}: its script, pid {run.record.pid}, has not "
            f"run Python for a second. helmsman why {run.run_id} says why."
        )
    query = Query(
        kind=options.action, target=options.target, number=number, limit_s=options.timeout
    )
    print(runs.ask_run(run, query, str))
    return OK


def _stop(options: argparse.Namespace) -> int:
    """Interrupt a run's script as Ctrl-C does; kill it if it does not end."""
    run = find_run(options.run_id, alive=True)
    if not _confirm(options, f"stop run {run.run_id} ({run.record.command})"):
        return NO
    process = os.pidfd_open(run.record.pid)
    signal.pidfd_send_signal(process, signal.SIGCONT)
    signals = (signal.SIGINT, options.timeout), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)
    for number, limit_s in signals:
        signal.pidfd_send_signal(process, number)
        ended = select.poll()  # select.select takes no descriptor above 1023
        ended.register(process, select.POLLIN)
        if ended.poll(limit_s * 1000):
            print(f"run {run.run_id} has ended after {number.name}")
            return OK
    print(f"run {run.run_id}: its process {run.record.pid} does not end", file=sys.stderr)
    return NO


def _confirm(options: argparse.Namespace, text: str) -> bool:
    if options.yes:
        return True
    print(f"{text}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def as_json(value: Any) -> str:
    """Format a value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, options


_ID = "id of the run, or the beginning of it"
_DIR = f"{_ID}, or its log directory"
_ARGUMENTS = {
    "RUN": _argument("run_id", metavar="RUN", help=_ID),
    "RUN?": _argument("run_id", nargs="?", metavar="RUN", help=f"{_ID}; default: the one alive"),
    "DIR": _argument("run_id", metavar="RUN", help=_DIR),
    "DIR?": _argument("run_id", nargs="?", metavar="RUN", help=f"{_DIR}; default: the last"),
    "ROLE": _argument("target", metavar="ROLE"),
    "ROLE?": _argument("role", nargs="?", metavar="ROLE", help="only this role, or 'script'"),
    "WORKER": _argument("target", metavar="WORKER"),
    "WORKER?": _argument("chosen", nargs="?", metavar="ROLE|WORKER", help="only this one"),
    "N": _argument("number", type=int, metavar="N"),
    "--run": _argument("--run", dest="run_id", metavar="RUN", help=_ID),
    "--address": _argument("--address", help="a Ray cluster that has the run"),
    "--all": _argument("--all", action="store_true", help="all threads of all processes"),
    "--follow": _argument("-f", "--follow", action="store_true", help="go on with new lines"),
    "--host": _argument("--host", default="127.0.0.1", help="address (default %(default)s)"),
    "--json": _argument("--json", action="store_true", help="print the result as JSON"),
    "--lines": _argument(
        "-n", "--lines", type=int, default=1000, help="last lines; default 1000; 0: all"
    ),
    "--out": _argument("-o", "--out", metavar="FILE", help="default: %(default)s"),
    "--port": _argument("--port", type=int, help="default: %(default)s; 0: any free one"),
    "--timeout": _argument(
        "--timeout", type=float, default=300.0, help="seconds; default %(default)g"
    ),
    "--watch": _argument("--watch", action="store_true", help="repeat until interrupted"),
    "--yes": _argument("--yes", action="store_true", help="do not ask for confirmation"),
}
_ACTIONS = {
    "drain": "Send an instance no more requests; those that run continue elsewhere.",
    "resume": "Send a drained instance requests again.",
    "kill": "Kill a worker; supervision starts it again.",
    "scale": "Change the number of workers of a role.",
}
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str, dict[str, Any]]] = {
    "status": (_status, "RUN? --address --json --watch", {}),
    "logs": (_logs, "DIR? WORKER? --address --follow --lines", {}),
    "stacks": (_stacks, "RUN ROLE? --address --all", {}),
    "why": (_why, "RUN? ROLE? --address --json", {}),
    "trace": (_trace, "DIR? --out", {"out": "out.perfetto-trace"}),
    "postmortem": (_postmortem, "DIR?", {}),
    "ui": (_ui, "RUN? --port", {"port": 0}),
    "report": (_report, "DIR? --out", {"out": "run.html"}),
    "metrics": (_metrics, "RUN? --host --port", {"port": 9464}),
    **dict.fromkeys(("drain", "resume", "kill"), (_act, "WORKER --run --yes --timeout", {})),
    "scale": (_act, "ROLE N --run --yes --timeout", {}),
    "stop": (_stop, "RUN --yes --timeout", {}),
}
"""Command -> function, whose docstring is the help text, arguments and their defaults."""
