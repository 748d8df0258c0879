"""The command line: clusters, plans, environments, leftovers, and views of running jobs."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from helmsman._cluster.checks import diagnose
from helmsman._cluster.up import add_command as add_up
from helmsman._cluster.up import node_options
from helmsman._desk.cleanup import age, describe, leftovers, remove
from helmsman._desk.commands import add_commands as add_operator_commands
from helmsman._desk.commands import as_json
from helmsman._desk.runs import attach, on_all
from helmsman._process.observation import HEAD_PORTS, Observed, observe, skew_s
from helmsman.api.errors import HelmsmanError
from helmsman.api.plan import Plan, Shortfall, aligned
from helmsman.api.scheduler import Job
from helmsman.api.version import __version__
from helmsman.controller._placement.admission import advise
from helmsman.controller._placement.job_files import load_cluster, load_jobs
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ACCELERATORS, ClusterSnapshot
from helmsman.controller._scheduler.environment import forwarding_report
from helmsman.controller._scheduler.run_registry import read_runs, refused_places

OK, NO, USAGE = 0, 1, 2
"""Exit codes: success; jobs do not fit or problems remain; invalid command line or file."""


def main(
    arguments: Sequence[str] | None = None, recipes: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Run a command.

    Args:
        arguments: Command-line arguments; those of the process by default.
        recipes: Further commands and their help texts; the caller runs them.

    Returns:
        The exit code.
    """

    def command() -> int | None:
        options = _parser(recipes).parse_args(arguments)
        code: int | None = options.run(options)
        return code

    try:
        return guarded(command)
    except KeyboardInterrupt:  # the usual end of --watch and --follow
        return OK


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; its errors are messages, and a reader may close its output.

    Args:
        command: Returns its exit code; None is success.

    Returns:
        The exit code.
    """
    code: int | None = None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # logs may have characters that it cannot print
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (HelmsmanError, OSError) as error:
        print(f"helmsman: {error}", file=sys.stderr)
        return USAGE
    return OK if code is None else code


def _parser(recipes: Mapping[str, str] = MappingProxyType({})) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="helmsman",
        description="Train; look into running jobs; manage clusters, plans and leftovers.",
    )
    parser.add_argument("--version", action="version", version=f"helmsman {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan", help="show where jobs would be placed, or why they do not fit; starts nothing"
    )
    plan.add_argument("file", metavar="FILE", help="jobs, in YAML or TOML")
    source = plan.add_mutually_exclusive_group()
    source.add_argument(
        "--cluster", metavar="FILE", help="nodes, in YAML or TOML, instead of a live cluster"
    )
    source.add_argument(
        "--address",
        help="a live Ray cluster; default: RAY_ADDRESS, or the cluster of this machine",
    )
    plan.add_argument("--json", action="store_true", help="print the plan or the shortfall as JSON")
    plan.set_defaults(run=_plan)

    node = node_options()
    doctor = commands.add_parser(
        "doctor", parents=[node], help="check that this node, or each of a cluster, is fit for runs"
    )
    doctor.add_argument("--address", help="check every node of this Ray cluster instead")
    ports = "a port that the head will listen on (repeatable; default 6379 and 6380)"
    doctor.add_argument("--port", type=int, action="append", metavar="P", help=ports)
    doctor.add_argument("--all", action="store_true", help="also print the checks that passed")
    doctor.add_argument("--json", action="store_true", help="print the results as JSON")
    doctor.set_defaults(run=_doctor)

    add_up(commands, node)

    env = commands.add_parser(
        "env", help="list the variables of this shell that reach workers, and by which rule"
    )
    env.add_argument("--all", action="store_true", help="also list those that reach no worker")
    env.set_defaults(run=_env)

    add_operator_commands(commands)

    runs = commands.add_parser("runs", help="list the runs of this user on this machine")
    runs.set_defaults(run=_runs)

    clean = commands.add_parser(
        "clean", help="stop leftover processes and remove files of killed runs, and old logs"
    )
    clean.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    clean.add_argument(
        "--run",
        action="append",
        default=[],
        dest="run_ids",
        metavar="ID",
        help="clean only this run (repeatable)",
    )
    clean.add_argument(
        "--logs", action="store_true", help="also remove the logs of all runs that have ended"
    )
    clean.add_argument(
        "--address", help="clean every node of this Ray cluster instead of this machine"
    )
    clean.set_defaults(run=_clean)
    for name, meaning in recipes.items():
        commands.add_parser(name, help=meaning)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    ports = HEAD_PORTS if options.port is None else options.port
    if options.address:
        seen, skews_s = _observe_cluster(attach(options.address))
    else:
        here = observe(
            rank=options.node_rank, count=options.num_nodes, head=options.head, ports=ports
        )
        seen, skews_s = {"this node": here}, {}
    diagnosis = diagnose(seen, num_devices=options.gpus, skews_s=skews_s)
    if options.json:
        print(as_json(diagnosis))
    else:
        print(diagnosis.report(everything=options.all))
    return NO if diagnosis.state == "bad" else OK


def _observe_cluster(
    nodes: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Observed], dict[str, float]]:
    seen, skews_s = {}, {}
    for node in nodes:
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        name = name if name not in seen else f"{name} {node['NodeID'][:8]}"
        asked_at = time.time()
        (seen[name],) = on_all([node], lambda: observe(ports=(), environ=None))
        skews_s[name] = skew_s(seen[name], asked_at, time.time())
    return seen, skews_s


def _plan(options: argparse.Namespace) -> int:
    jobs = load_jobs(options.file)
    holders = ""
    if options.cluster:
        snapshot = load_cluster(options.cluster)
    else:
        snapshot, holders = _live(options.address, jobs)
    outcome = plan_jobs(snapshot, jobs)
    if isinstance(outcome, Plan):
        table = f"{outcome.table()}\n\n{_summary(outcome, snapshot)}"
        print(msgspec.json.encode(outcome).decode() if options.json else table)
        return OK
    empty = plan_jobs(snapshot, jobs, of="total")
    ever = isinstance(empty, Plan)
    shortfall = outcome if isinstance(empty, Plan) else advise(empty, snapshot, jobs)
    if options.json:
        found = {"fits_when_empty": ever, "shortfall": shortfall, "held_by": holders}
        print(msgspec.json.encode(found).decode())
    else:
        print(_refusal(shortfall, ever, holders))
    return NO


def _summary(plan: Plan, snapshot: ClusterSnapshot) -> str:
    bundles = [
        bundle for role in plan.roles for instance in role.instances for bundle in instance.bundles
    ]
    used = {bundle.node_id for bundle in bundles}
    num_devices = sum(bundle.resources.get(name, 0) for bundle in bundles for name in ACCELERATORS)
    whole = [
        node
        for node in snapshot.nodes
        if node.node_id not in used
        and any(
            node.total.get(name) and node.total[name] == node.available.get(name)
            for name in ACCELERATORS
        )
    ]
    on = f"{len(used)} of {len(snapshot.nodes)} nodes"
    return f"{num_devices:g} devices on {on}; {len(whole)} other nodes keep all of theirs free"


def _refusal(shortfall: Shortfall, ever: bool, holders: str) -> str:
    if not ever:
        return f"does not fit, now or later: {shortfall}"
    held = f" It is held by {holders}." if holders else ""
    return f"does not fit now, but would if the cluster were empty: {shortfall}{held}"


def _live(address: str | None, jobs: Sequence[Job]) -> tuple[ClusterSnapshot, str]:
    attach(address)
    from helmsman.controller._scheduler.ray.cluster_state import describe_holders, snapshot

    return snapshot(), describe_holders("helmsman/none", jobs)


def _env(options: argparse.Namespace) -> int:
    report = forwarding_report(os.environ)
    shown = [each for each in report if options.all or each.reach != "nowhere"]
    rows = [("variable", "reaches", "value", "rule")]
    for each in shown:
        value = each.value if len(each.value) <= 60 else f"{each.value[:57]}..."
        rows.append((each.name, each.reach, value, each.rule))
    print(aligned(rows))
    hidden = len(report) - len(shown)
    if hidden:
        print(
            f"\n{hidden} more reach no worker (--all shows them); SchedulingSpec.env_vars sets any."
        )
    return OK


def _runs(options: argparse.Namespace) -> int:
    rows = [("run", "state", "pid", "since", "scheduler", "command")]
    for record, alive in read_runs():
        since = age(time.time() - record.since)
        state = "alive" if alive else "dead"
        rows.append(
            (record.run_id, state, str(record.pid), since, record.scheduler, record.command[:60])
        )
    print(aligned(rows))
    refused = refused_places()
    for _, reason in refused:
        print(f"helmsman: {reason}", file=sys.stderr)
    return NO if refused else OK


def _clean(options: argparse.Namespace) -> int:
    if options.address:
        return _clean_cluster(options)
    return _report(_clean_here(options.run_ids, options.dry_run, options.logs), options)


def _clean_here(
    run_ids: Sequence[str],
    dry_run: bool,
    logs: bool,
    dead: Sequence[str] = (),
    alive: Sequence[str] = (),
) -> list[tuple[str, list[str], list[str]]]:
    """Return (action, lines, problems) for each run on this machine.

    ``dead`` and ``alive`` are the runs whose state is known from other nodes.
    """
    actions = [("not used", [f"place {path}"], [reason]) for path, reason in refused_places()]
    for left in leftovers(run_ids, logs=logs, alive=alive):
        is_named, lines = left.run_id in run_ids, describe(left)
        if left.state == "alive":
            reason = f"run {left.run_id} is alive; end its script"
            if is_named:
                actions.append(("kept, since its controller lives", lines, [reason]))
        elif left.state == "unknown" and not is_named and left.run_id not in dead:
            actions.append(("kept, since it has no record here (--run ends it)", lines, []))
        elif dry_run:
            actions.append(("would be removed", lines, []))
        else:
            actions.append(("removed", lines, remove(left)))
    return actions


def _report(
    actions: Sequence[tuple[str, list[str], list[str]]],
    options: argparse.Namespace,
    where: str = "",
) -> int:
    for action, (first, *rest), problems in actions:
        print(f"{where}{first}: {action}", *rest, sep="\n")
        for problem in problems:
            print(f"helmsman: {where}{problem}", file=sys.stderr)
    missing = set(options.run_ids) - {lines[0].split()[1].rstrip(":") for _, lines, _ in actions}
    if not where:
        for run_id in sorted(missing):
            print(f"run {run_id}: nothing of it is here")
        if not actions and not missing:
            print("nothing to clean")
    return NO if any(problems for _, _, problems in actions) else OK


def _clean_cluster(options: argparse.Namespace) -> int:
    """Clean every node.

    First collect the dead runs, since only the controller's node can identify them.
    """
    nodes = attach(options.address)
    found = [left for each in on_all(nodes, leftovers, options.run_ids) for left in each]
    alive = {left.run_id for left in found if left.state == "alive"}
    dead = sorted({left.run_id for left in found if left.state == "dead"} - alive)
    done = on_all(
        nodes, _clean_here, options.run_ids, options.dry_run, options.logs, dead, sorted(alive)
    )
    addresses = [node["NodeManagerAddress"] for node in nodes]
    return max(
        _report(actions, options, f"{address}: ")
        for address, actions in zip(addresses, done, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
