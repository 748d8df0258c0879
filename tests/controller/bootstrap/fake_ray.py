"""Stands in for ``ray start --block``: run as a script, with the folder of a made-up cluster before
Ray's own arguments.

It writes what it was given to a folder of its rank, enters itself in the roll there, says that it
is up, and stays. A file ``behaviour`` in that folder says what else it does, in words:

    fails         ends with exit code 1 and a message
    waits         says that it is up once the word is gone
    hangs         never says that it is up
    unlisted      does not enter itself in the roll
    raylet        starts a child of that program name
    busy          does not end when it is drained
    twice         is listed beside one of its rank that was killed
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
    if "raylet" in words:  # by a program of that name, as which the supervisor knows it
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
    """Write atomically, so that readers see all of it or nothing."""
    path = os.path.join(node, name)
    with open(f"{path}.new", "w") as file:
        json.dump(facts, file)
    os.rename(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
