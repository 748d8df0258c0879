"""Every error says what to do, and survives the way from a worker to the driver."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import pytest

from helmsman.api import errors
from helmsman.api.errors import HelmsmanError


class Row(NamedTuple):
    error: HelmsmanError
    facts: tuple[str, ...]
    """What the message must contain."""
    next_step: str
    """The advice, as a fragment of the message; empty for an internal error, which callers turn into another."""


CALL: dict[str, Any] = {"worker_id": "train/1", "engine_name": "actor", "method": "step"}
REMOTE: dict[str, Any] = {
    **CALL,
    "remote_type": "ZeroDivisionError",
    "remote_message": "division by zero",
    "remote_traceback": 'Traceback\n  File "engine.py", line 7, in step\nZeroDivisionError: division by zero\n',
    "node": "node-a",
    "log_path": "logs/train-1.log",
}
REMOTE_FACTS = (
    "train/1",
    "node-a",
    "ZeroDivisionError: division by zero",
    '  |   File "engine.py", line 7',
    "logs/train-1.log",
)
PAYLOAD: dict[str, Any] = {**CALL, "path": "args[0].lock", "value_type": "_thread.lock", "reason": "cannot pickle"}
PAYLOAD_FACTS = ("train/1: actor.step", "args[0].lock", "_thread.lock", "cannot pickle")
WORKER_FAILED = errors.WorkerFailedError(
    **CALL,
    node="node-a",
    pid=4711,
    cause="was killed by SIGKILL",
    exit_signal=9,
    running="actor.train",
    running_s=2.5,
    log_path="logs/train-1.log",
    log_tail="almost there\nlast words\n",
)
WORKER_FAILED_FACTS = (
    "train/1",
    "node-a",
    "4711",
    "SIGKILL",
    "actor.train",
    "2.5 s",
    "actor.step has no result",
    "logs/train-1.log",
    "  | last words",
)

ROWS = [
    Row(HelmsmanError("plain", a=1), ("plain",), ""),
    Row(errors.JobError("job 'train' is odd", role="train"), ("train",), ""),
    Row(errors.InvalidReplicasError(role="train", replicas=0), ("'train'", "0 replicas"), "Set Job.replicas to 1 or more"),
    Row(errors.TaskCountError(role="train", replicas=4, num_tasks=3), ("'train'", "3", "4 replicas"), "give either 1 spec"),
    Row(
        errors.InvalidSpecError(role="train", field="tasks[0].cpu", value=-1, expected="0 or more"),
        ("'train'", "tasks[0].cpu", "-1"),
        "expected 0 or more",
    ),
    Row(
        errors.RendezvousError(
            role="train",
            address="10.0.0.1",
            port=20001,
            source="rank 0 is train/0; 10.0.0.1 is the address of its node, and port 20001 is leased to it",
            refused="",
            reached=["train/0"],
            failed={"train/1": "No route to host", "train/2": "No route to host"},
        ),
        ("10.0.0.1:20001", "rank 0 is train/0", "2 of 3 ranks", "No route to host: train/1, train/2", "reached by train/0"),
        "no firewall closes the ports",
    ),
