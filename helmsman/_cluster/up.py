"""``helmsman up``: from flags and launcher variables to a node's plan and its execution."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helmsman._cluster.async_utils import (
    StatusPrinter,
    StoppedError,
    run_script,
    status_printer,
    stop_signals,
)
from helmsman._cluster.head import Head
from helmsman._cluster.joining_node import JoiningNode
from helmsman._cluster.node_plan import NodePlan
from helmsman._cluster.preflight import node_address, require_port, versions
from helmsman._cluster.settings import (
    NODE_DEFAULTS,
    Setting,
    cluster_defaults,
    object_store_bytes,
    of_address,
    parse_resources,
    parse_variables,
    shown,
    variables,
)
from helmsman._desk.cleanup import (
    leftovers,
    remove,
    remove_old_logs,
    up_folder,
    up_places,
)
from helmsman._process.devices import detect_devices
from helmsman._process.launchers import NodeIdentity, identify_node
from helmsman._process.observation import (
    HEAD_PORTS,
    RAY_SOCKET_BYTES,
    SOCKET_PATH_BYTES,
    cpus_allowed,
    memory_available,
    size,
)
from helmsman._process.safe_files import private_directory, remove_tree
from helmsman._process.upkeep import Folder, Upkeep
from helmsman._wire.tls import TLS_VARIABLE, uses_tls
from helmsman.api.environment import masked
from helmsman.api.errors import BootstrapError, PreflightError
from helmsman.api.platforms import PLATFORMS
from helmsman.controller._scheduler.run_registry import (
    UP,
    RunLock,
    default_log_dir,
    make_log_dir,
    new_run_id,
)

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "HELMSMAN_TOKEN"
_LONGEST_PLACE = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - len("/hm-0123456789")
"""Maximum length in bytes of a folder path for which Ray's socket paths are short enough."""


_NODE_OPTIONS = """
--node-rank R  rank of this node, 0 for the head; overrides the launcher's
--num-nodes N  number of nodes; overrides the launcher's
--head HOST  name or address of the head node; overrides the launcher's
--gpus N  accelerators that this node, or each one, must have
"""
_OPTIONS = f"""
--port P  port of the head's Ray (default {HEAD_PORTS[0]}; any free one with one node)
--control-port P  port of the head's supervisor (default: --port + 1)
--interface NAME  network interface towards the other nodes
--token-file FILE  file with a shared secret (or {TOKEN_VARIABLE}); without it, any host can join
--resources JSON  resources for Ray, overriding the detected ones: '{{"NPU": 8}}'
--object-store GIB  size of Ray's object store (default: 30%% of the available memory)
--timeout S  seconds to wait for all nodes (default %(default)g)
--start-timeout S  seconds for Ray to start on a node (default %(default)g)
--grace S  seconds for the program to exit after a signal (default %(default)g)
--env NAME=VALUE  set a variable on this node (repeatable)
--dashboard  start Ray's dashboard on the head
--elastic  continue when another node receives a signal
--show-settings  print the settings of this node and start nothing
"""
_DEFAULTS: Mapping[str, Any] = {
    "--interface": "",
    "--resources": "{}",
    "--timeout": 600.0,
    "--start-timeout": 60.0,
    "--grace": 5.0,
    "--env": [],
}


def node_options() -> argparse.ArgumentParser:
    """Return a parent parser with the options that identify a node."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser, _NODE_OPTIONS)
    return parser


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    node: argparse.ArgumentParser,
) -> None:
    """Add ``helmsman up`` to the command line, with the options that identify a node."""
    up = commands.add_parser(
        "up",
        parents=[node],
        help="start a Ray cluster on the nodes of this job and run a script on it",
        usage="%(prog)s [options] -- program [argument ...]",
        description="Run it on every node of a job. Rank 0 starts a Ray cluster, waits for all "
        "nodes and runs the program; the others join, and leave when the program has ended. Rank, "
        "number of nodes and head come from the launcher's variables (Slurm, Kubernetes, Beaker, "
        "SkyPilot, torchrun, Volcano, PAI, dstack, MPI) or from flags. The nodes' supervisors use "
        f"TLS; {TLS_VARIABLE}=0 on all nodes switches it off.",
    )
    _add_options(up, _OPTIONS)
    up.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    up.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser, table: str) -> None:
    """Add the options of a table with a flag, the name of its value, and its help."""
    types: Mapping[str, Any] = {"R": int, "N": int, "P": int, "GIB": float, "S": _seconds}
    for row in filter(None, table.split("\n")):
        usage, meaning = row.split("  ", 1)
        flag, _, value = usage.partition(" ")
        if not value:
            parser.add_argument(flag, help=meaning, action="store_true")
            continue
        parser.add_argument(
            flag,
            help=meaning,
            metavar=value,
            type=types.get(value, str),
            default=_DEFAULTS.get(flag),
            action="append" if value == "NAME=VALUE" else "store",
        )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0.0:  # False for nan
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative number of seconds")


def run(options: argparse.Namespace) -> int:
    report = status_printer(options.node_rank or 0)
    try:
        identity = identify_node(
            os.environ, rank=options.node_rank, count=options.num_nodes, head=options.head
        )
        report = status_printer(identity.rank)
        command = options.program[1:] if options.program[:1] == ["--"] else options.program
        if not command and not options.show_settings:
            raise PreflightError(
                "there is no program to run: helmsman up [options] -- python train.py"
            )
        if identity.attach_to and options.show_settings:
            print(
                f"{identity.said_by['attach_to']}: the program runs on that cluster, and nothing "
                "is set here"
            )
            return 0
        if identity.attach_to:
            return asyncio.run(_on_existing_cluster(identity, command, options.grace, report))
        with run_folder(os.environ) as (run_id, folder):
            plan = make_plan(options, identity, command, run_id, folder)
            if options.show_settings:
                print(describe(plan))
                return 0
            code = asyncio.run(_live(plan, report))
            if code:
                keep_logs(run_id, folder, report)
            return code
    except BootstrapError as error:
        report(str(error))
        return error.exit_code


async def _live(plan: NodePlan, report: StatusPrinter) -> int:
    stop = stop_signals()
    report(_outline(plan))
    if not plan.secret and plan.identity.count > 1:
        report(
            f"no token is given (--token-file, {TOKEN_VARIABLE}): any host that reaches port "
            f"{plan.control_port} could join"
        )
    supervisor = JoiningNode if plan.identity.rank else Head
    try:
        return await supervisor(plan, report, stop).run()
    except BootstrapError as error:
        report(str(error))
        return error.exit_code


async def _on_existing_cluster(
    identity: NodeIdentity, command: list[str], grace_s: float, report: StatusPrinter
) -> int:
    from helmsman.controller._scheduler.ray.cluster_state import require_answer

    require_answer(identity.attach_to)
    report(f"{identity.said_by['attach_to']}: the program runs on that cluster")
    try:
        return await run_script(command, os.environ, stop_signals(), grace_s)
    except StoppedError as stopped:
        return stopped.exit_code


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield (id, folder) for all files of Ray in this node's part of a run.

    The folder is private to this user and has a record that marks the run as alive. It is removed
    with the run or, if the run was killed, by the next run.

    Raises:
        PreflightError: No place is suitable for the folder.
    """
    run_id = new_run_id()
    fitting = (place for place in up_places(environ) if len(os.fsencode(place)) <= _LONGEST_PLACE)
    folder = up_folder(next(fitting, Path("/tmp")), run_id)
    with contextlib.ExitStack() as undo:
        try:
            for left in leftovers():
                if left.state == "dead" and left.record is not None and left.record.scheduler == UP:
                    remove(left)
            remove_old_logs()
            record = RunLock(run_id, UP, folder)
            undo.callback(record.release)
            with private_directory(folder.parent, folder.name):
                undo.callback(_remove_folder, folder)
            upkeep = Upkeep(functools.partial(log.warning, "run %s: %s", run_id))
            undo.callback(upkeep.stop)
            upkeep.add(f"its record {record.path}", record.renew)
            upkeep.add(f"its folder {folder}", Folder(folder, with_files=True).renew)
            upkeep.start()
        except OSError as error:
            raise PreflightError(
                f"the folder for Ray's files and the run's record cannot be created in "
                f"{folder.parent}: {str(error).rstrip('.')}. Set TMPDIR, and RAY_TMPDIR if it is "
                "set, to a writable folder"
            ) from error
        yield run_id, folder


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the next run, or `helmsman clean`, removes the rest
        remove_tree(folder)


def keep_logs(run_id: str, folder: Path, report: StatusPrinter) -> None:
    kept = default_log_dir(run_id)
    for path in [folder / "ray_start.log", *folder.glob("ray/session_2*/logs")]:
        if path.exists():
            try:
                make_log_dir(kept, run_id)
                shutil.move(path, kept / path.name)
            except OSError as error:
                # For example a full disk; this must not change the exit code of the run.
                report(f"Ray's logs of this node cannot be kept in {kept}: {error}")
                return
    if kept.exists():
        report(f"Ray's logs of this node are kept in {kept}")


def make_plan(
    options: argparse.Namespace,
    identity: NodeIdentity,
    command: list[str],
    run_id: str,
    folder: Path,
) -> NodePlan:
    """Make the plan for this node; see NodePlan for the arguments.

    Raises:
        PreflightError: The node cannot take part in the run.
    """
    address, interface = node_address(identity, options.interface)
    alone = identity.count == 1
    port = options.port or (0 if alone else HEAD_PORTS[0])
    control_port = 0 if alone else options.control_port or port + 1
    if port and port == control_port:
        raise PreflightError(
            f"--port and --control-port are both {port}: the head listens on both, so give "
            "two different ports"
        )
    for number, what, flag in (
        (port, "of the head's Ray", "--port"),
        (control_port, "on which the nodes' supervisors meet", "--control-port"),
    ):
        if number:
            require_port(number, what, flag, listens=identity.rank == 0)
    given = parse_variables(options.env)
    pool = detect_devices(None, None)
    resources = {"CPU": float(max(1, int(cpus_allowed(os.environ))))}
    if pool.ids:
        resources[PLATFORMS[pool.kind].ray_resource] = float(len(pool.ids))
    resources |= parse_resources(options.resources)
    kind = next((name for name in ("GPU", "NPU") if resources.get(name)), "GPU")
    num_devices = int(resources.get(kind, 0))
    if options.gpus is not None and options.gpus != num_devices:
        raise PreflightError(
            f"{options.gpus} accelerators are expected on this node (--gpus) and {num_devices} "
            "are found: check the driver (nvidia-smi, rocm-smi, npu-smi), the visibility "
            "variables and the devices of the container"
        )
    of_cluster = cluster_defaults(identity.count, options.start_timeout)
    of_node = [
        *NODE_DEFAULTS,
        *of_address(address, interface, chosen=bool(options.interface)),
    ]
    known = {default.name for default in (*of_cluster, *of_node)}
    of_node += [Setting(name, value) for name, value in given.items() if name not in known]
    return NodePlan(
        identity=identity,
        command=command,
        address=address,
        port=port,
        control_port=control_port,
        secret=_secret(options.token_file),
        versions=versions(),
        num_devices=num_devices,
        device_kind=kind,
        resources=resources,
        store_bytes=object_store_bytes(
            options.object_store, memory_available(os.environ), shutil.disk_usage("/dev/shm").free
        ),
        cluster_settings=variables(of_cluster, os.environ, given),
        node_settings=variables(of_node, os.environ, given),
        run_id=run_id,
        timeout_s=options.timeout,
        ray_start_s=options.start_timeout,
        grace_s=options.grace,
        folder=folder,
        tls=_tls(),
        dashboard=options.dashboard,
        elastic=options.elastic,
    )


def _outline(plan: NodePlan) -> str:
    settings = (*plan.cluster_settings, *plan.node_settings)
    own = [
        f"{each.name}={masked(each.name, each.value)}"
        for each in settings
        if each.source != "default"
    ]
    kind = f"your own settings: {', '.join(own)}" if own else "default settings"
    return f"{_summary(plan)}; {kind} (--show-settings shows all)"


def _summary(plan: NodePlan) -> str:
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in plan.resources.items())
    return f"address {plan.address}, {amounts}, object store {size(plan.store_bytes)}"


def describe(plan: NodePlan) -> str:
    return (
        f"{plan.identity}; {_summary(plan)}\n\n"
        f"the same on all nodes, as the head has it:\n{shown(plan.cluster_settings)}\n\n"
        f"on this node:\n{shown(plan.node_settings)}"
    )


def _tls() -> bool:
    try:
        return uses_tls(os.environ)
    except ValueError as error:
        raise PreflightError(str(error)) from error


def _secret(path: str | None) -> str:
    if path is None:
        # Stripped as from a file: a launcher's secret may come from a file with a final newline.
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(f"--token-file {path}: {error}") from error
    if not secret:
        raise PreflightError(
            f"--token-file {path} is empty; make one with: openssl rand -hex 32 > {path}"
        )
    return secret
