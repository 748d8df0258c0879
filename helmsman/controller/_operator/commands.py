"""The commands that look into a run and act on it: `helmsman status`, `why`, `drain`, ..."""

from __future__ import annotations

import argparse
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

from helmsman.api.run_state import RunSnapshot
from helmsman.controller._diagnosis.diagnosis import diagnose_run
from helmsman.controller._diagnosis.texts import is_healthy, stacks_text, status_text, why_text
from helmsman.controller._node.control_socket import Query
from helmsman.controller._operator.cluster import attach, lines_here, on_all, one_here, two_here
from helmsman.controller._operator.logs import coloured, follow, merge, read_lines, sources
from helmsman.controller._operator.metrics import serve_until_end
from helmsman.controller._operator.postmortem import postmortem
from helmsman.controller._operator.recordings import missing_recordings
from helmsman.controller._operator.replay import describe_calls, kept_calls, replay
from helmsman.controller._operator.runs import (
    FoundRun,
    RunNotFoundError,
    act,
    find_run,
    take_snapshot,
    take_stacks,
    take_two,
)
from helmsman.controller._operator.trace import write_trace
from helmsman.controller._operator.ui import Server, write_report

T = TypeVar("T")

OK, NO = 0, 1
_WATCH_S = 2.0


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    run_help = "id of the run, or the beginning of it; default: the only run that is alive"

    status = commands.add_parser(
        "status", help="show a run: step, workers, calls, requests and weight versions"
    )
    status.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    address_help = "a Ray cluster, one of whose nodes runs the script"
    status.add_argument("--address", help=address_help)
    status.add_argument("--json", action="store_true", help="print the snapshot as JSON")
    status.add_argument("--watch", action="store_true", help="repeat until interrupted")
    status.set_defaults(run=_status)

    logs = commands.add_parser(
        "logs", help="show the logs of a run, of its script and all workers, in the order of time"
    )
    logs.add_argument("run_id", nargs="?", metavar="RUN", help=f"{run_help}, or its log directory")
    logs.add_argument("chosen", nargs="?", metavar="ROLE|WORKER", help="only this role or worker")
    logs.add_argument("--address", help="a Ray cluster, whose nodes have logs of the run")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines")
    logs.add_argument(
        "-n",
        "--lines",
        type=int,
        default=1000,
        metavar="N",
        help="last N lines (default 1000; 0: all)",
    )
    logs.set_defaults(run=_logs)

    stacks = commands.add_parser(
        "stacks", help="show the Python stacks of a run's processes, equal ones together"
    )
    stacks.add_argument("run_id", metavar="RUN", help=run_help)
    stacks.add_argument("role", nargs="?", metavar="ROLE", help="only this role, or 'script'")
    stacks.add_argument("--address", help=address_help)
    stacks.add_argument("--all", action="store_true", help="all threads of all processes")
    stacks.set_defaults(run=_stacks)

    why = commands.add_parser(
        "why", help="explain why a run hangs, or what it waits for; exit code 1 for a problem"
    )
    why.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    why.add_argument("role", nargs="?", metavar="ROLE", help="only this role")
    why.add_argument("--address", help=address_help)
    why.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    why.set_defaults(run=_why)

    trace = commands.add_parser(
        "trace", help="write the recent calls, phases and requests of a run for ui.perfetto.dev"
    )
    trace.add_argument("run_id", nargs="?", metavar="RUN", help=f"{run_help}, or its log directory")
    trace.add_argument(
        "-o", "--out", default="out.perfetto-trace", metavar="FILE", help="default: %(default)s"
    )
    trace.set_defaults(run=_trace)

    post = commands.add_parser(
        "postmortem", help="show the last minute of a run that has ended, the first cause first"
    )
    post.add_argument("run_id", nargs="?", metavar="RUN", help=f"{run_help}, or its log directory")
    post.set_defaults(run=_postmortem)

    again = commands.add_parser(
        "replay", help="repeat a call whose arguments a run has kept, in this process, in pdb"
    )
    again.add_argument("run_id", metavar="RUN", help=f"{run_help}, or its log directory")
    again.add_argument(
        "call", nargs="?", type=int, metavar="CALL", help="number of the call; default: list them"
    )
    again.add_argument("--no-debugger", action="store_true", help="only run it")
    again.set_defaults(run=_replay)

    page = commands.add_parser(
        "ui", help="serve a web page about a run on this machine: timeline, workers, stacks, logs"
    )
    page.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    page.add_argument("--port", type=int, default=0, help="port (default: any free one)")
    page.set_defaults(run=_ui)

    report = commands.add_parser(
        "report", help="write the page about a run, alive or ended, to a file"
    )
    report.add_argument(
        "run_id", nargs="?", metavar="RUN", help=f"{run_help}, or its log directory"
    )
    report.add_argument("-o", "--out", default="run.html", metavar="FILE")
    report.set_defaults(run=_report)

    metrics = commands.add_parser("metrics", help="serve a run's metrics for Prometheus")
    metrics.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    metrics.add_argument("--host", default="127.0.0.1", help="address (default %(default)s)")
    metrics.add_argument("--port", type=int, default=9464, help="port (default %(default)s)")
    metrics.set_defaults(run=_metrics)
    _add_actions(commands)


def _add_actions(commands: Any) -> None:
    confirmed = argparse.ArgumentParser(add_help=False)
    confirmed.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    confirmed.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="limit in seconds (default 300)"
    )
    texts = {
        "drain": "send an instance no more requests; those that run continue elsewhere",
        "resume": "send a drained instance requests again",
        "kill": "kill a worker; supervision starts it again",
        "scale": "change the number of workers of a role",
        "stop": "interrupt a run's script as Ctrl-C does; kill it if it does not end",
    }
    for name, text in texts.items():
        action = commands.add_parser(name, parents=[confirmed], help=text)
        if name == "stop":
            action.add_argument("run_id", metavar="RUN", help="id of the run")
        else:
            action.add_argument("target", metavar="ROLE" if name == "scale" else "WORKER")
            action.add_argument("--run", dest="run_id", metavar="RUN", help="id of the run")
        if name == "scale":
            action.add_argument("number", type=int, metavar="N")
        action.set_defaults(run=_stop if name == "stop" else _act, action=name)


def _status(options: argparse.Namespace) -> int:
    snapshot = _snapshot(options, reports=False, role=None)
    text = _json(snapshot) if options.json else status_text(snapshot)
    if not options.watch:
        print(text)
        return OK if is_healthy(snapshot) else NO
    with _screen() as show:
        while True:
            show(text)
            time.sleep(_WATCH_S)
            earlier, snapshot = snapshot, _snapshot(options, reports=False, role=None)
            text = _json(snapshot) if options.json else status_text(snapshot, earlier)


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text in place of the one before, or below it without rich."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield functools.partial(print, flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)


def _logs(options: argparse.Namespace) -> int:
    colour = sys.stdout.isatty()
    if options.address:
        parts = on_all(attach(options.address), lines_here, options.run_id, options.chosen)
        found, others = merge(parts), " on any node"
    else:
        run = _find_recorded(options)
        if options.follow:
            for source, line in follow(run.log_dir, options.chosen, options.lines):
                print(coloured(source, line, colour=colour), flush=True)
        found = read_lines(run.log_dir, options.chosen)
        others = f"; the run has logs of {', '.join(sources(run.log_dir)) or 'no worker'}"
    if not found:
        raise RunNotFoundError(f"no log of {options.chosen or 'any worker'}{others}.")
    for _, source, line in found[-options.lines :]:
        print(coloured(source, line, colour=colour))
    return OK


def _stacks(options: argparse.Namespace) -> int:
    if options.all and not options.address:
        run = find_run(options.run_id, alive=True)
        for worker_id, text in take_stacks(run, options.role).items():
            print(f"{worker_id}:\n{text}\n")
        return OK
    print(stacks_text(_snapshot(options, reports=True, role=options.role)))
    return OK


def _why(options: argparse.Namespace) -> int:
    if options.address:
        nodes = attach(options.address)
        now, before = _first(on_all(nodes, two_here, options.run_id, options.role), options)
    else:
        now, before = take_two(find_run(options.run_id, alive=True), options.role)
    diagnosis = diagnose_run(now, before)
    print(_json(diagnosis) if options.json else why_text(diagnosis))
    return OK if diagnosis.is_healthy else NO


def _snapshot(options: argparse.Namespace, *, reports: bool, role: str | None) -> RunSnapshot:
    if not options.address:
        return take_snapshot(find_run(options.run_id, alive=True), reports=reports, role=role)
    nodes = attach(options.address)
    return _first(on_all(nodes, one_here, options.run_id, role, reports), options)


def _first(answers: Iterable[T | None], options: argparse.Namespace) -> T:
    for answer in answers:
        if answer is not None:
            return answer
    raise RunNotFoundError(
        f"no run {options.run_id or 'that is alive'} of this user on the nodes of the cluster."
    )


def _find_recorded(options: argparse.Namespace) -> FoundRun:
    run = find_run(options.run_id)
    for each in missing_recordings(run.log_dir):
        print(f"helmsman: {each}", file=sys.stderr)
    return run


def _trace(options: argparse.Namespace) -> int:
    run = _find_recorded(options)
    num_events = write_trace(run.log_dir, Path(options.out))
    print(f"{options.out}: {num_events} events of run {run.run_id}; open it at ui.perfetto.dev")
    return OK


def _postmortem(options: argparse.Namespace) -> int:
    run = _find_recorded(options)
    if run.is_alive:
        print(f"run {run.run_id} is alive; helmsman why {run.run_id} explains what it waits for")
    text, is_closed = postmortem(run.log_dir)
    print(text)
    return OK if is_closed else NO


def _replay(options: argparse.Namespace) -> int:
    calls = kept_calls(find_run(options.run_id).log_dir)
    if options.call is None:
        print(describe_calls(calls) or "no call was kept; see scheduler.reporter.keep_calls")
        return OK
    print(repr(replay(calls, options.call, debugger=not options.no_debugger)))
    return OK


def _ui(options: argparse.Namespace) -> int:
    run = find_run(options.run_id)
    try:
        server = Server(run.run_id, options.port)
    except OSError as error:
        where = f"127.0.0.1:{options.port}"
        print(f"helmsman: the page cannot be served at {where}: {error}", file=sys.stderr)
        return NO
    print(server.url, flush=True)
    with server:
        server.serve_forever()
    return OK


def _report(options: argparse.Namespace) -> int:
    run = _find_recorded(options)
    write_report(run, Path(options.out))
    print(f"{options.out}: run {run.run_id}")
    return OK


def _metrics(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)

    def take() -> RunSnapshot | None:
        try:
            return take_snapshot(find_run(run.run_id, alive=True), reports=False)
        except RunNotFoundError:
            return None

    try:
        serve_until_end(take, options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        print(f"helmsman: metrics cannot be served at {where}: {error}", file=sys.stderr)
        return NO
    return OK


def _confirm(options: argparse.Namespace, text: str) -> bool:
    if options.yes:
        return True
    print(f"{text}? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _act(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)
    number = getattr(options, "number", 0)
    text = f"{options.action} {options.target}" + (f" to {number}" if number else "")
    if not _confirm(options, f"{text} of run {run.run_id}"):
        return NO
    query = Query(
        kind=options.action, target=options.target, number=number, limit_s=options.timeout
    )
    print(act(run, query))
    return OK


def _stop(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)
    assert run.record is not None
    if not _confirm(options, f"stop run {run.run_id} ({run.record.command})"):
        return NO
    process = os.pidfd_open(run.record.pid)
    signals = (signal.SIGINT, options.timeout), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)
    for number, limit_s in signals:
        signal.pidfd_send_signal(process, number)
        if select.select([process], [], [], limit_s)[0]:
            print(f"run {run.run_id} has ended after {number.name}")
            return OK
    print(f"run {run.run_id}: its process {run.record.pid} does not end", file=sys.stderr)
    return NO


def _json(value: RunSnapshot | Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
