"""``helmsman up``: from flags and the launcher's variables to a plan for this node, and its life."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from helmsman.api.environment import masked
from helmsman.api.errors import BootstrapError, PreflightError
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.controller._bootstrap.async_utils import StoppedError, Tell, first, stop_signals, teller
from helmsman.controller._bootstrap.head import Head
from helmsman.controller._bootstrap.joining_node import Member
from helmsman.controller._bootstrap.node_plan import NodePlan
from helmsman.controller._bootstrap.preflight import node_address, require_free, require_port, versions
from helmsman.controller._bootstrap.run_folder import keep_logs, run_folder
from helmsman.controller._bootstrap.script import Script
from helmsman.controller._bootstrap.settings import (
    NODE_DEFAULTS,
    Setting,
    cluster_defaults,
    object_store_bytes,
    of_address,
    parse_resources,
    parse_variables,
    shown,
    start_limits,
    variables,
)
from helmsman.controller._node.checks import HEAD_PORTS, cpus_allowed, memory_available, size
from helmsman.controller._node.devices import detect_devices
from helmsman.controller._node.launchers import NodeIdentity, identify_node
from helmsman.rpc_server._wire.tls import TLS_VARIABLE, uses_tls

TOKEN_VARIABLE = "HELMSMAN_TOKEN"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe ``helmsman up`` to the command line."""
    up = commands.add_parser(
        "up",
        help="bring a Ray cluster up on the nodes of this job, and run a script on it",
        usage="%(prog)s [options] -- program [argument ...]",
        description="Give it to every node of a job. Rank 0 starts a Ray cluster, waits for all nodes and runs the program; "
        "the others join, and leave when the program has ended. Rank, number of nodes and head come from the launcher's "
        "variables (Slurm, Kubernetes, Beaker, SkyPilot, torchrun, Volcano, PAI, dstack, MPI) or from flags. "
        f"The nodes' supervisors use TLS; {TLS_VARIABLE}=0 on all nodes switches it off.",
    )
    up.add_argument("--node-rank", type=int, metavar="R", help="rank of this node, 0 for the head")
    up.add_argument("--num-nodes", type=int, metavar="N", help="how many nodes there are")
    up.add_argument("--head", metavar="HOST", help="name or address of the node of rank 0")
    up.add_argument("--port", type=int, metavar="P", help=f"of the head's Ray (default {HEAD_PORTS[0]}; any with one node)")
    up.add_argument("--control-port", type=int, metavar="P", help="on which the nodes' supervisors meet (default: --port + 1)")
    up.add_argument("--interface", default="", metavar="NAME", help="network interface that leads to the other nodes")
    up.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"a secret that the nodes share (or {TOKEN_VARIABLE}); without it, any host can join",
    )
    up.add_argument("--gpus", type=int, metavar="N", help="accelerators that this node must have")
    up.add_argument("--resources", default="{}", metavar="JSON", help="what Ray is told of, over what is found: '{\"NPU\": 8}'")
    up.add_argument(
        "--object-store", type=float, metavar="GIB", help="size of Ray's object store (default: 30%% of the available memory)"
    )
    up.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="how long nodes are waited for (default 600)")
    up.add_argument(
        "--start-timeout", type=_seconds, default=60.0, metavar="S", help="seconds for Ray to start on a node (default 60)"
    )
    up.add_argument(
        "--grace", type=_seconds, default=5.0, metavar="S", help="what the program has to end when it is told to (default 5)"
    )
    up.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable on this node (repeatable)")
    up.add_argument("--dashboard", action="store_true", help="start Ray's dashboard on the head")
    up.add_argument("--elastic", action="store_true", help="go on when another node is told to leave")
    up.add_argument("--show-settings", action="store_true", help="print what would be set on this node, and start nothing")
    up.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    up.set_defaults(run=run)


def _seconds(text: str) -> float:
    """A duration. Raises: ArgumentTypeError for what is none."""
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0.0:  # which nan is not
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns its exit code."""
    tell = teller(options.node_rank or 0)
    try:
        identity = identify_node(os.environ, rank=options.node_rank, count=options.num_nodes, head=options.head)
        tell = teller(identity.rank)
        command = options.program[1:] if options.program[:1] == ["--"] else options.program
        if not command and not options.show_settings:
            raise PreflightError("there is no program to run: helmsman up [options] -- python train.py")
        if identity.attach_to and options.show_settings:
            print(f"{identity.said_by['attach_to']}: the program runs on that cluster, and nothing is set here")
            return 0
        if identity.attach_to:
            return asyncio.run(_on_cluster_there(identity, command, options.grace, tell))
        with run_folder(os.environ) as (run_id, folder):
            plan = make_plan(options, identity, command, run_id, folder)
            if options.show_settings:
                print(describe(plan))
                return 0
            code = asyncio.run(_live(plan, tell))
            if code:
                keep_logs(run_id, folder, tell)
            return code
    except BootstrapError as error:
        tell(str(error))
        return error.exit_code


async def _live(plan: NodePlan, tell: Tell) -> int:
    stop = stop_signals()
    tell(_outline(plan))
    if not plan.secret and plan.identity.count > 1:
        tell(f"no token is given (--token-file, {TOKEN_VARIABLE}): any host that reaches port {plan.control_port} could join")
    supervisor = Member if plan.identity.rank else Head
    try:
        return await supervisor(plan, tell, stop).run()
    except BootstrapError as error:
        tell(str(error))
        return error.exit_code


async def _on_cluster_there(identity: NodeIdentity, command: list[str], grace_s: float, tell: Tell) -> int:
    """Run the program on a cluster that somebody else keeps (RAY_ADDRESS): nothing is started, and nothing ended."""
    from helmsman.controller._ray_backend.address import require_answer

    require_answer(identity.attach_to)
    stop = stop_signals()
    tell(f"{identity.said_by['attach_to']}: the program runs on that cluster")
    script = await Script.start(command, os.environ)
    ended = asyncio.ensure_future(script.ended())
    await first(ended, stop)
    if ended.done():
        return ended.result()
    stopped: StoppedError = stop.result()
    await script.stop(stopped.number, grace_s)
    return stopped.exit_code


def make_plan(options: argparse.Namespace, identity: NodeIdentity, command: list[str], run_id: str, folder: Path) -> NodePlan:
    """What this node is to do; see NodePlan for the arguments. Raises: PreflightError when it cannot."""
    address, interface = node_address(identity, options.interface)
    alone = identity.count == 1
    port = options.port or (0 if alone else HEAD_PORTS[0])
    control_port = 0 if alone else options.control_port or port + 1
    if port and port == control_port:
        raise PreflightError(f"--port and --control-port are both {port}: the head listens on each, so name two")
    for number, what, flag in (
        (port, "of the head's Ray", "--port"),
        (control_port, "on which the nodes' supervisors meet", "--control-port"),
    ):
        if number:
            require_port(number, what, flag)
            if identity.rank == 0:
                require_free(number, what, flag)
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
            f"{options.gpus} accelerators are expected on this node (--gpus) and {num_devices} are found: look at the driver "
            "(nvidia-smi, npu-smi), the visibility variables, and what the container was given"
        )
    local = of_address(address, interface, chosen=bool(options.interface))
    defaults = (*cluster_defaults(identity.count), *start_limits(options.start_timeout))
    known = {default.name for default in (*defaults, *NODE_DEFAULTS, *local)}
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
        store_bytes=object_store_bytes(options.object_store, memory_available(os.environ), shutil.disk_usage("/dev/shm").free),
        cluster_settings=variables(defaults, os.environ, given),
        node_settings=[
            *variables((*NODE_DEFAULTS, *local), os.environ, given),
            *(Setting(name, value, "--env") for name, value in given.items() if name not in known),
        ],
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
    """What is set here, and what of it is the user's own, on a line."""
    settings = (*plan.cluster_settings, *plan.node_settings)
    own = [f"{each.name}={masked(each.name, each.value)}" for each in settings if each.source != "default"]
    kind = f"your own settings: {', '.join(own)}" if own else "default settings"
    return (
        f"address {plan.address}, {_amounts(plan)}, object store {size(plan.store_bytes)}; {kind} (--show-settings shows all)"
    )


def _amounts(plan: NodePlan) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in plan.resources.items())


def describe(plan: NodePlan) -> str:
    """What will be set, as people read it."""
    identity = plan.identity
    where = f"node {identity.rank} of {identity.count} ({identity.launcher}), address {plan.address}"
    return "\n".join(
        [
            where,
            f"Ray is told of {_amounts(plan)}",
            f"object store {size(plan.store_bytes)}",
            "",
            "the same on all nodes, as the head has it:",
            shown(plan.cluster_settings),
            "",
            "on this node:",
            shown(plan.node_settings),
        ]
    )


def _tls() -> bool:
    try:
        return uses_tls(os.environ)
    except ValueError as error:
        raise PreflightError(str(error)) from error


def _secret(path: str | None) -> str:
    if path is None:
        # As from a file: a launcher's secret may have been made of one, with its last line end.
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(f"--token-file {path}: {error}") from error
    if not secret:
        raise PreflightError(f"--token-file {path} is empty; make one with: openssl rand -hex 32 > {path}")
    return secret
