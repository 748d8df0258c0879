"""The rendezvous variables of torch for the ranks of a role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from helmsman.api.errors import InvalidSpecError
from helmsman.api.scheduler import Worker


def rank_environment(role: str, workers: Sequence[Worker]) -> dict[str, dict[str, str]]:
    """The rendezvous variables of torch for each worker, by worker id.

    The master is rank 0's own node and the first port leased to it; local ranks count the workers of one address.

    Raises: InvalidSpecError when rank 0 has no leased port.
    """
    master = workers[0]
    if not master.engine_ports:
        raise InvalidSpecError(
            role=role,
            field="port_count",
            value=0,
            expected=f"at least 1 for {master.id}, where the process group meets (with colocation, in the target's spec)",
        )
    per_node = Counter(worker.ip for worker in workers)
    seen: Counter[str] = Counter()
    environment = {}
    for rank, worker in enumerate(workers):
        environment[worker.id] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(workers)),
            "LOCAL_RANK": str(seen[worker.ip]),
            "LOCAL_WORLD_SIZE": str(per_node[worker.ip]),
            "MASTER_ADDR": master.ip,
            "MASTER_PORT": master.engine_ports[0],
        }
        seen[worker.ip] += 1
    return environment
