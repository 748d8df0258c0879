"""Hostile peers of a gateway, in a process of their own.

``python -m tests.agents.flood PORT NUM KIND...`` holds NUM connections of these kinds. Each peer
comes again when it is refused. The process prints "ready" once each has connected, and "served"
for a response other than a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Sequence

HEAD = "POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
KINDS = {
    "silent": b"",
    "slow": b"",
    "long head": (HEAD + 3 * f"x: {'y' * 8000}\r\n").encode(),
    "large body": f"{HEAD}Content-Length: {24 << 20}\r\n\r\n".encode(),
    "wrong key": f"{HEAD}x-api-key: sk-x\r\nContent-Length: {24 << 20}\r\n\r\n".encode(),
    "chunked body": f"{HEAD}Transfer-Encoding: chunked\r\n\r\n100000\r\n".encode(),
    "expectation": f"{HEAD}Expect: 100-continue\r\nContent-Length: 100\r\n\r\n".encode(),
    "malformed": b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01",
}
PAUSE_S = 0.5


async def _attack(kind: str, port: int, connected: asyncio.Event) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connected.set()
            with contextlib.closing(writer):
                writer.write(KINDS[kind])
                if "body" in kind or kind == "wrong key":
                    writer.write(bytes(1 << 18))
                answer = asyncio.ensure_future(reader.readline())
                while kind == "slow" and not (await asyncio.wait([answer], timeout=PAUSE_S))[0]:
                    writer.write(b"x")
                if (line := await answer) and line.split()[1][:1] != b"4":
                    print("served", kind, line, flush=True)
        await asyncio.sleep(PAUSE_S)


async def _main(port: int, num: int, kinds: Sequence[str]) -> None:
    connected = [asyncio.Event() for _ in range(num)]
    tasks = [
        asyncio.ensure_future(_attack(kinds[at % len(kinds)], port, each))
        for at, each in enumerate(connected)
    ]
    for each in connected:
        await each.wait()
    print("ready", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
