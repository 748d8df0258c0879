"""Program: starts a run with two workers, and prints the command lines of its processes.

helper_processes.py local|ray
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from helmsman import Job, make_scheduler

VARIABLE = "HELMSMAN_TEST_CAUSED_BY"


class Counter:
    def add(self, amount: int) -> int:
        return amount + 1


def caused_by(token: str, run_id: str) -> Iterator[str]:
    """Yield the command lines of the processes whose first environment has a token.

    A title overwrites the environment, and names the run instead.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environ = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes()
            except OSError:  # it has ended, or belongs to another user
                continue
            if command and (token.encode() in environ or run_id.encode() in command):
                yield command.replace(b"\0", b" ").decode(errors="replace").strip()


if __name__ == "__main__":
    token = os.environ[VARIABLE] = uuid.uuid4().hex
    options = {"num_cpus": 4} if sys.argv[1] == "ray" else {}
    with make_scheduler(sys.argv[1], **options) as scheduler:
        workers = scheduler.create_workers(Job(role="counter", replicas=2))
        run_id = scheduler.log_dir.name
        scheduler.create_engines(workers, Counter, "counter")
        scheduler.call_engine(workers[0], "add", "counter", 1)
        print("\n".join(caused_by(token, run_id)))
