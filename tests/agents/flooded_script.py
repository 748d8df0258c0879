"""A script with 1,024 descriptors and a gateway, which hostile peers flood while agents take turns.

``python -m tests.agents.flooded_script NUM KIND...`` prints its observations as JSON.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

import aiohttp

from helmsman import Job, RolloutController, SchedulingSpec, make_scheduler
from helmsman.agents import AgentGateway
from tests.agents.constant_model import plain_tokenizer

NUM_FILES = 1024
NUM_TURNS = 20
BODY = {"messages": [{"role": "user", "content": "a"}]}


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def _turns(gateway: AgentGateway) -> int:
    """Take turns in two sessions: on one connection, and on a new one for each turn."""
    num_done = 0
    async with gateway.session() as session, gateway.session() as other:
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession() as kept,
            aiohttp.ClientSession(connector=connector) as new,
        ):
            for _ in range(NUM_TURNS):
                for client, each in ((kept, session), (new, other)):
                    headers = {"x-api-key": each.key}
                    async with client.post(
                        f"{each.base_url}/chat/completions", json=BODY, headers=headers
                    ) as response:
                        num_done += response.status == 200
    return num_done


def _observe(flood_arguments: Sequence[str]) -> dict[str, object]:
    spec = SchedulingSpec(cpu=0.1)
    with (
        make_scheduler("local") as scheduler,
        RolloutController(
            scheduler, "tests.agents.constant_model.Constant", Job(role="rollout", tasks=[spec])
        ) as rollout,
        AgentGateway(rollout, plain_tokenizer()) as gateway,
    ):
        found: dict[str, object] = {"turns before": asyncio.run(_turns(gateway))}
        before = _memory_bytes()
        port = gateway.url.rpartition(":")[2]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.agents.flood", port, *flood_arguments],
            stdout=subprocess.PIPE,
        ) as flood:
            assert flood.stdout is not None
            found["flood"] = flood.stdout.readline().decode().strip()
            found["turns"] = asyncio.run(_turns(gateway))
            rollout.scale(3)
            (status, *_) = scheduler.status()
            assert status.pid is not None
            os.kill(status.pid, signal.SIGKILL)
            rollout.remove([status.worker_id])
            rollout.add(1)
            found["workers"] = len(rollout.workers)
            found["turns after restart"] = asyncio.run(_turns(gateway))
            found["files"] = len(os.listdir("/proc/self/fd"))
            found["grown bytes"] = _memory_bytes() - before
            flood.kill()
            found["served"] = flood.stdout.read().decode()
    return found


def main(flood_arguments: Sequence[str]) -> None:
    """Print the observations, with all that was logged."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    text = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(text))
    print(json.dumps(_observe(flood_arguments) | {"log": text.getvalue()}))


if __name__ == "__main__":
    main(sys.argv[1:])
