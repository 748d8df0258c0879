"""Tests that a run listens only where SECURITY.md says, and refuses another user there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from helmsman import LocalScheduler
from helmsman._desk.ui import Server
from helmsman.agents import AgentGateway
from helmsman.controller._weights.via_collective import ViaCollective
from tests.agents.constant_model import plain_tokenizer
from tests.controller.sync_world import World
from tests.hostile.other_user import SPEECHES, connected, speak
from tests.listeners import Listener, family_of, listeners_of

ROOT = Path(__file__).parents[2]
GREETING = "helmsman plain\n"

pytest.importorskip("prometheus_client")


class Run(NamedTuple):
    world: World
    listeners: list[Listener]
    ports: dict[int, str]
    """Names of listeners, by ports that are known."""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    before = listeners_of([os.getpid()])
    command = [sys.executable, "-m", "helmsman", "metrics", "--port", "0"]
    with (
        LocalScheduler(preload=()) as scheduler,
        World(scheduler, 2, 1) as world,
        AgentGateway(world.rollout, plain_tokenizer()) as gateway,
        Server(scheduler.run_id, 0) as page,
        subprocess.Popen(
            [*command, scheduler.run_id], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as metrics,
    ):
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            world.step()
            world.sync(ViaCollective()).push()
            assert metrics.stdout is not None
            ports = {
                port_of(gateway.url): "agent gateway",
                port_of(metrics.stdout.readline()): "metrics",
                page.server_port: "page",
            }
            listeners = sorted(listeners_of(family_of(os.getpid())) - before)
            yield Run(world, listeners, ports)
        finally:
            metrics.terminate()
            page.shutdown()
            thread.join()


def port_of(url: str) -> int:
    found = re.search(r":(\d+)", url.partition("//")[2])
    assert found, url
    return int(found[1])


def listed() -> set[str]:
    """Return the names in SECURITY.md's table of listeners."""
    text = (ROOT / "SECURITY.md").read_text().partition("## Listeners")[2]
    return {row[1] for row in re.finditer(r"^\| ([^|]+?) \|", text, re.MULTILINE)}


def name_of(listener: Listener, ports: dict[int, str]) -> str:
    """Return the name of a listener in SECURITY.md, or its description if it is none of them."""
    if listener.family == "unix":
        for name, start in (("control socket", "@helmsman/"), ("worker channel", "@helmsman-")):
            if listener.address.startswith(start):
                return name
        return str(listener)
    if listener.port in ports:
        return ports[listener.port]
    try:
        with connected(listener.family, listener.address, listener.port) as peer:
            greeting = peer.recv(len(GREETING)).decode("latin1")
    except TimeoutError:
        return "gloo"
    return "group store" if greeting == GREETING else str(listener)


def test_listeners_are_listed(run: Run) -> None:
    names = {name_of(each, run.ports) for each in run.listeners}
    assert names <= listed()
    assert names == {"agent gateway", "metrics", "page", "control socket", "worker channel"} | {
        "gloo",
        "group store",
    }
    assert {each.address for each in run.listeners if each.family == "tcp"} == {"127.0.0.1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_listeners_refuse_another_user(run: Run) -> None:
    given = json.dumps([(each.family, each.address, each.port) for each in run.listeners])
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.other_user"],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    served = {
        (name_of(listener, run.ports), speech): answer
        for listener, answers in zip(run.listeners, json.loads(done.stdout), strict=True)
        for speech, answer in answers.items()
        if not is_refusal(answer)
    }
    assert not served
    run.world.step()
    run.world.sync(ViaCollective()).push()
    assert run.world.differing() == {id_: [] for id_ in run.world.ids}


def test_store_of_torch_is_detected() -> None:
    """Torch's own store answers to a speech of the other user."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer = speak("tcp", "127.0.0.1", store.port, SPEECHES["TCPStore"])
    assert not is_refusal(answer), answer


def is_refusal(answer: str) -> bool:
    """Return whether a listener has said nothing, greeted and refused, or answered by a 4xx."""
    text = answer.rpartition("!")[0] if re.search(r"!\w+$", answer) else answer
    if re.match(r"HTTP/1\.\d 4\d\d |<!DOCTYPE HTML>", text):  # HTTP 0.9 has no status line
        return not text.startswith("<") or re.search(r"Error code: 4\d\d", text) is not None
    nonce, refused = 32, "\0" * 32
    is_greeting = text.startswith(GREETING) and text[len(GREETING) + nonce :] in ("", refused)
    return text == "" or is_greeting
