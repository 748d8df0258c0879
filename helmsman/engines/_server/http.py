"""HTTP client of an inference server: one connection pool and the rules for retries.

A request is retried only if it cannot have started: the connection was refused, or the server
answered 503. Any other failure is an error, since the server may have worked on the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from helmsman.api.errors import ServerLostError, ServerRequestError
from helmsman.api.extras import needed_by

if TYPE_CHECKING:
    import aiohttp

_IDLE_S = 2.0
"""Seconds that an unused connection is kept. Less than servers use (uvicorn 5 s); otherwise a
request could race with the server closing the connection.
"""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0
_HEALTH_S = 5.0
_BUSY = 503
_NEWS_S = 2.0
"""Seconds that a broken connection waits for the exit of the server's process to be detected."""


class ServerClient:
    """Sends requests to one server ('host:port') from one event loop.

    A request that cannot have started is retried for ``retry_s`` seconds. ``has_ended`` returns
    whether the server's process has ended; ``lost`` builds the error of a broken connection from a
    reason.
    """

    def __init__(
        self,
        address: str,
        key: str,
        health_route: str,
        *,
        retry_s: float,
        has_ended: Callable[[], bool],
        lost: Callable[[str], ServerLostError],
    ) -> None:
        self._address, self._key, self._health_route = address, key, health_route
        self._retry_s, self._has_ended, self._lost = retry_s, has_ended, lost
        self._library = library()
        self._session: aiohttp.ClientSession | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """Loop that sends the requests; None before the first one."""
        self.is_closed = False

    async def call(
        self,
        method: str,
        route: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        limit_s: float,
        busy_status: int = _BUSY,
    ) -> bytes:
        """Send a request and return the answer's body.

        Raises:
            ServerRequestError: The status is not 200.
            ServerLostError: The connection broke.
            TimeoutError: There was no answer within ``limit_s`` seconds.
        """
        try:
            async with (
                asyncio.timeout(limit_s),
                self._broken_is_lost(route),
                await self._send(method, route, body, params, busy_status) as response,
            ):
                answer: bytes = await response.read()
                return answer
        except TimeoutError as error:
            raise TimeoutError(
                f"the inference server at {self._address} did not answer {route} within "
                f"{limit_s:g} s; the request may still complete. "
                "Raise ServerConfig.control_timeout_s if it needs more time"
            ) from error

    async def events(self, route: str, body: Any) -> AsyncGenerator[bytes, None]:
        """Post a request and yield the data of the events (text/event-stream) that answer it.

        Leaving the loop early closes the connection. There is no time limit.

        Raises:
            ServerRequestError: The status is not 200.
            ServerLostError: The connection broke.
        """
        async with (
            self._broken_is_lost(route),
            await self._send("POST", route, body, None) as response,
        ):
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield data

    @contextlib.asynccontextmanager
    async def _broken_is_lost(self, route: str) -> AsyncIterator[None]:
        try:
            yield
        except ServerLostError:
            raise  # a ServerLostError is an OSError
        except (self._library.ClientError, OSError) as error:
            await self._raise_lost(route, error)

    async def refuse(self, route: str, status: int, answer: str, expected: str) -> NoReturn:
        """Raise the error for an unusable answer.

        It is ServerLostError if the server has ended or is unhealthy, else ServerRequestError.
        """
        if self._has_ended() or not await self._is_healthy():
            await self._raise_lost(route, self._refused(route, status, answer, expected))
        raise self._refused(route, status, answer, expected)

    async def _is_healthy(self) -> bool:
        """Return whether the server is healthy; after its model died, it reports that and exits."""
        try:
            async with (
                asyncio.timeout(_HEALTH_S),
                self._connected().get(f"http://{self._address}{self._health_route}") as response,
            ):
                return response.status == 200
        except TimeoutError:
            return True  # SGLang's health check takes as long as its batches
        except (self._library.ClientError, OSError):
            return False

    def _refused(self, route: str, status: int, answer: str, expected: str) -> ServerRequestError:
        steps = {
            401: "Its key is not this run's: look for a second server at this address",
            404: "It has no such route: see docs/architecture.md for the versions that have, and "
            "its own flags",
        }
        step = steps.get(status, "See its answer, and its output in the worker's log")
        return ServerRequestError(
            address=self._address,
            route=route,
            status=status,
            answer=answer[:2000],
            expected=expected,
            step=step,
        )

    async def close(self) -> None:
        """Close the connections."""
        self.is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(
        self,
        method: str,
        route: str,
        body: Any,
        params: Mapping[str, str] | None,
        busy_status: int = _BUSY,
    ) -> aiohttp.ClientResponse:
        """Send a request, with retries; return the response with its body unread."""
        deadline = time.monotonic() + self._retry_s
        pause_s = _LEAST_PAUSE_S
        data = msgspec.json.encode({} if body is None else body) if method == "POST" else None
        while True:
            is_late = time.monotonic() > deadline
            try:
                response = await self._connected().request(
                    method, f"http://{self._address}{route}", data=data, params=params
                )
            except self._library.ClientConnectorError as error:
                if is_late or self._has_ended():
                    await self._raise_lost(route, error)
            else:
                if response.status == 200:
                    return response
                answer = (await response.read()).decode(errors="replace")
                if response.status != busy_status or is_late or self._has_ended():
                    await self.refuse(route, response.status, answer, "200")
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_MOST_PAUSE_S, 2 * pause_s)

    def _connected(self) -> aiohttp.ClientSession:
        if self.is_closed:
            raise self._lost("its engine was destroyed")
        if self._session is None:
            aiohttp = self._library
            self.loop = asyncio.get_running_loop()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                headers={
                    "Authorization": f"Bearer {self._key}",
                    "Content-Type": "application/json",
                },
                trust_env=False,  # no proxy between a worker and its own server
            )
        return self._session

    def require_server(self) -> None:
        """Raise ServerLostError if the server's process has ended."""
        if self._has_ended():
            raise self._lost("it has ended")

    async def wait_end(self) -> None:
        """Wait briefly for the end of the server's process to be detected."""
        deadline = time.monotonic() + _NEWS_S
        # Another thread sets the flag.
        while not self._has_ended() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _raise_lost(self, route: str, error: Exception) -> NoReturn:
        """Raise the error of a broken connection, after waiting briefly for the process to end."""
        await self.wait_end()
        raise self._lost(f"{route}: {type(error).__name__}: {error}") from error


def library() -> Any:
    """Import aiohttp; raise BackendNotInstalledError if it is missing."""
    with needed_by("ServerEngine", "aiohttp"):
        import aiohttp
    return aiohttp
