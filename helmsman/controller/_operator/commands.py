"""The commands `helmsman status`, `logs`, `stacks` and `why`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import msgspec

from helmsman.api.run_state import RunSnapshot
from helmsman.controller._diagnosis.diagnosis import diagnose_run
from helmsman.controller._operator.logs import coloured, merged
from helmsman.controller._operator.runs import find_run, take_snapshot, take_stacks, take_two
from helmsman.controller._operator.screens import is_healthy, stacks_text, status_text, why_text

OK, NO = 0, 1
_WATCH_S = 2.0


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    run_help = "id of the run, or the beginning of it; default: the only run that is alive"

    status = commands.add_parser(
        "status", help="show a run: step, workers, calls, requests and weight versions"
    )
    status.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    status.add_argument("--json", action="store_true", help="print the snapshot as JSON")
    status.add_argument("--watch", action="store_true", help="repeat until interrupted")
    status.set_defaults(run=_status)

    logs = commands.add_parser(
        "logs", help="show the logs of a run, of its script and all workers, in the order of time"
    )
    logs.add_argument("run_id", nargs="?", metavar="RUN", help=f"{run_help}, or its log directory")
    logs.add_argument("chosen", nargs="?", metavar="ROLE|WORKER", help="only this role or worker")
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
    stacks.add_argument("--all", action="store_true", help="all threads of all processes")
    stacks.set_defaults(run=_stacks)

    why = commands.add_parser(
        "why", help="explain why a run hangs, or what it waits for; exit code 1 for a problem"
    )
    why.add_argument("run_id", nargs="?", metavar="RUN", help=run_help)
    why.add_argument("role", nargs="?", metavar="ROLE", help="only this role")
    why.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    why.set_defaults(run=_why)


def _status(options: argparse.Namespace) -> int:
    run, earlier = find_run(options.run_id, alive=True), None
    while True:
        snapshot = take_snapshot(run, reports=False)
        if options.json:
            print(_json(snapshot))
        else:
            text = status_text(snapshot, earlier)
            print(f"\x1b[H\x1b[2J{text}" if options.watch and sys.stdout.isatty() else text)
        if not options.watch:
            return OK if is_healthy(snapshot) else NO
        sys.stdout.flush()
        earlier = snapshot
        time.sleep(_WATCH_S)


def _logs(options: argparse.Namespace) -> int:
    run = find_run(options.run_id)
    colour = sys.stdout.isatty()
    lines = merged(run.log_dir, options.chosen, num_lines=options.lines, follow=options.follow)
    for source, line in lines:
        print(coloured(source, line, colour=colour), flush=options.follow)
    return OK


def _stacks(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)
    if options.all:
        for worker_id, text in take_stacks(run, options.role).items():
            print(f"{worker_id}:\n{text}\n")
        return OK
    print(stacks_text(take_snapshot(run, reports=True, role=options.role)))
    return OK


def _why(options: argparse.Namespace) -> int:
    run = find_run(options.run_id, alive=True)
    diagnosis = diagnose_run(*take_two(run, options.role))
    print(_json(diagnosis) if options.json else why_text(diagnosis))
    return OK if diagnosis.is_healthy else NO


def _json(value: RunSnapshot | Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
