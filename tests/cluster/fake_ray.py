"""A replacement for ``ray start --block``, with the folder of a fake cluster as its first argument.

It writes its arguments to a folder of its rank, lists itself there, reports its start, and waits. A
file ``behaviour`` in that folder contains words that change this:

    fails         ends with exit code 1 and a message
    waits         reports its start once the word is removed
    hangs         never reports its start
    unlisted      does not list itself
    raylet        starts a child with that program name
    busy          does not end when it is drained
    twice         is listed beside a killed Ray of its rank
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

STARTED = "Ray runtime started."


def main(cluster: str, arguments: list[str]) -> None:
    flags = dict(each.partition("=")[::2] for each in arguments)
    labels = dict(each.split("=") for each in flags["--labels"].split(","))
    node = os.path.join(cluster, labels["helmsman-rank"])
    os.makedirs(node, exist_ok=True)
    words = behaviour(node)
    child = 0
    if "raylet" in words:  # the supervisor finds it by its program name
        child = subprocess.Popen(["sleep", "1000"], executable=os.path.join(cluster, "raylet")).pid
    facts = {"flags": flags, "environ": dict(os.environ), "pid": os.getpid(), "raylet": child}
    write(node, "started", facts)
    while "waits" in behaviour(node):
        time.sleep(0.01)
    if "fails" in words:
        sys.exit("no room for an object store")
    if "hangs" not in words:
        if "unlisted" not in words:
            resources = {
                "CPU": float(flags["--num-cpus"]),
                "GPU": float(flags.get("--num-gpus", 0)),
            }
            write(
                node,
                "listed",
                {
                    "run": labels["helmsman-run"],
                    "address": flags["--node-ip-address"],
                    "resources": resources,
                },
            )
        print(STARTED, flush=True)
    while True:
        signal.pause()


def behaviour(node: str) -> list[str]:
    try:
        with open(os.path.join(node, "behaviour")) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def write(node: str, name: str, facts: dict[str, object]) -> None:
    """Write a file atomically."""
    path = os.path.join(node, name)
    with open(f"{path}.new", "w") as file:
        json.dump(facts, file)
    os.rename(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
