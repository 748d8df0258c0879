"""Tests that a node's supervisor answers `helmsman status` and `why` without a scheduler."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from helmsman._desk.control_socket import Query, Refusal, ask
from helmsman._desk.diagnosis import Diagnosis, diagnose_run
from helmsman._desk.texts import status_text
from helmsman.api.run_state import RunSnapshot
from tests.cluster.nodes import MakeNodes, Node
from tests.cluster.up_command import Up, up
from tests.contract.helpers import wait_until

__all__ = ["up"]

WORKER = """
import time
from helmsman import Job, LocalScheduler
with LocalScheduler(preload=()) as scheduler:
    scheduler.create_workers(Job(role="actor"))
    print("scheduler is up", flush=True)
    time.sleep(3600)
"""


def has_socket(node: Node) -> bool:
    try:
        return bool(ask(node.plan.run_id, Query(kind="snapshot")))
    except ConnectionRefusedError:
        return False


def snapshot(node: Node) -> RunSnapshot:
    waits(lambda: has_socket(node), f"its socket:\n{node.output}")
    answer = ask(node.plan.run_id, Query(kind="snapshot", reports=True))
    return msgspec.msgpack.decode(answer, type=RunSnapshot)


def until(node: Node, rule: str) -> Diagnosis:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        now = snapshot(node)
        diagnosis = diagnose_run(now, now)
        if [each.rule for each in diagnosis.findings] == [rule]:
            return diagnosis
        time.sleep(0.1)
    raise AssertionError(diagnosis)


def diagnosed(now: RunSnapshot) -> Diagnosis:
    return diagnose_run(now, now)


def shown(now: RunSnapshot) -> str:
    return status_text(now, diagnosed(now))


def waits(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what, 30.0)


def test_desk_before_the_script(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3)
    head, member = nodes.start(0), nodes.start(1)
    (finding,) = until(head, "nodes missing").findings
    assert "rank 0 of 3" in finding.cause
    assert "waits for the other nodes: rank 2, not connected" in finding.cause
    (finding,) = until(member, "nodes missing").findings
    assert "rank 2, not connected" in finding.cause
    assert "missing: 1 of 3 nodes are missing: rank 2, not connected" in shown(snapshot(member))
    nodes.start(2)
    nodes.wait_running()
    waits(lambda: snapshot(member).node.doing == "is part of the run", "rank 1 is part")  # type: ignore[union-attr]
    assert diagnosed(snapshot(head)).is_healthy


def test_desk_of_node_without_head(make_nodes: MakeNodes) -> None:
    member = make_nodes(2).start(1)
    diagnosis = until(member, "nodes missing")
    (finding,) = diagnosis.findings
    head = f"{member.plan.identity.head}:{member.plan.control_port}"
    assert finding.subject == "rank 1 of 2"
    assert f"looks for the head: rank 0 ({head}) does not answer" in finding.cause
    assert not diagnosis.is_healthy


def test_desk_while_the_script_is_stopped(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, port=0)
    (head,) = nodes.start_running()
    now = snapshot(head)
    assert now.node is not None
    assert now.node.doing == "runs the script"
    assert diagnosed(now).is_healthy
    assert diagnosed(now).waits_for.startswith("Rank 0 of 1 runs the script")
    pid, _ = now.node.processes["script"]
    os.kill(pid, signal.SIGSTOP)
    (finding,) = until(head, "process stopped").findings
    assert finding.subject == "script"
    assert finding.next_step == f"kill -CONT {pid} lets it continue."
    os.kill(pid, signal.SIGCONT)


def test_desk_shows_workers_and_their_stacks(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, port=0, command=[sys.executable, "-c", WORKER])
    head = nodes.start(0)
    head.said("scheduler is up")
    now = snapshot(head)
    (worker,) = now.workers
    assert worker.worker_id == "actor/0"
    assert worker.report is not None
    assert any(each.frames for each in worker.report.stacks)
    assert now.script is not None
    assert "actor/0" in shown(now)
    head.signal(signal.SIGTERM)
    head.ends(143)


def test_desk_refuses_actions(make_nodes: MakeNodes) -> None:
    (head,) = make_nodes(1, port=0).start_running()
    answer = ask(head.plan.run_id, Query(kind="kill", target="actor/0"))
    refusal = msgspec.msgpack.decode(answer, type=Refusal)
    assert "kill needs the scheduler of a script" in refusal.refused


def test_up_answers_a_command_on_its_node(up: Up) -> None:
    """The command is the script of the run, so the run has no scheduler."""
    command = (sys.executable, "-m", "helmsman._cli", "status")
    run = up("--", *command)
    run.ends(0, "rank 0 of 1 runs the script", "raylet: pid ", "script: pid ", limit_s=100.0)
