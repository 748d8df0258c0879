"""Scripts for ``helmsman up`` in tests: python program.py WHAT [ARGUMENT]."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


def count(code: str) -> int:
    """Join, say what is seen, and end with this code."""
    import helmsman

    cluster = helmsman.initialize()
    ranks = sorted(node.labels["helmsman-rank"] for node in cluster.nodes)
    print(f"sees {len(cluster.nodes)} nodes of ranks {ranks} with {dict(cluster.num_devices)}", flush=True)
    return int(code)


def busy() -> int:
    """An actor on each node that never comes back, and then wait."""
    import ray

    import helmsman

    cluster = helmsman.initialize()

    class Busy:
        def spin(self) -> None:
            while True:
                pass

        def there(self) -> int:
            return 1

    actors: list[Any] = [
        ray.remote(num_cpus=1, resources={f"node:{node.address}": 0.01})(Busy).remote() for node in cluster.nodes
    ]
    print(f"busy on {sum(ray.get([actor.there.remote() for actor in actors]))} nodes", flush=True)
    for actor in actors:
        actor.spin.remote()
    threading.Event().wait()
    return 0


def loses() -> int:
    """A call on the other node, which never comes back, until Ray says that it is lost."""
    import ray

    import helmsman

    (other,) = [node for node in helmsman.initialize().nodes if node.labels["helmsman-rank"] == "1"]

    class Waits:
        def there(self) -> int:
            return 1

        def hang(self) -> None:
            threading.Event().wait()

    actor: Any = ray.remote(num_cpus=1, resources={f"node:{other.address}": 0.01})(Waits).remote()
    ray.get(actor.there.remote())
    call = actor.hang.remote()
    print("the call is made", flush=True)
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        print("the call is lost", flush=True)
    return 0


def stubborn() -> int:
    """Be deaf to signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print("deaf", flush=True)
    while True:
        signal.pause()


def wait() -> int:
    """Until a signal."""
    print("waits", flush=True)
    threading.Event().wait()
    return 0


def interrupts() -> int:
    """Say whether one SIGINT comes, or another after it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("waits", flush=True)
    signal.sigwait({signal.SIGINT})
    again = signal.sigtimedwait({signal.SIGINT}, 1.0)
    print("interrupted once" if again is None else "interrupted twice", flush=True)
    return 130


if __name__ == "__main__":
    sys.exit(
        {"count": count, "busy": busy, "loses": loses, "stubborn": stubborn, "wait": wait, "interrupts": interrupts}[
            sys.argv[1]
        ](*sys.argv[2:])
    )
