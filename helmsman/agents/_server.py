"""The HTTP server of an AgentGateway: routes, keys, bodies and errors."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from helmsman import HelmsmanError
from helmsman.agents._dialects.base import Dialect
from helmsman.agents._messages import BadRequestError
from helmsman.agents._session import DIALECT_PATHS, DIALECTS, AgentSession
from helmsman.api.extras import needed_by

if TYPE_CHECKING:
    from aiohttp import web

    from helmsman.agents.gateway import AgentGateway

log = logging.getLogger(__name__)

_MAX_BODY = 32 << 20
_BODY_S = 60.0
"""Longest time in seconds for a request's body to arrive."""
_PING_S = 10.0
_RETRY_AFTER_S = 1


class _RefusedError(HelmsmanError):
    """A request cannot be served, by an HTTP status of its own."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self), self.code)


async def serve(
    gateway: AgentGateway, host: str, port: int
) -> tuple[Callable[[], Awaitable[None]], int]:
    """Start the server on the current event loop.

    Args:
        gateway: Answers the requests.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.

    Returns:
        A coroutine function that stops the server, and its port.

    Raises:
        BackendNotInstalledError: aiohttp is missing.
        OSError: The port is taken.
    """
    with needed_by("AgentGateway", "aiohttp"):
        from aiohttp import web

    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_failures])
    handlers = _Handlers(gateway)
    for root in ("/v1", "/sessions/{id}/v1", "/sessions/{id}/v1/v1"):
        for path in DIALECT_PATHS:
            app.router.add_post(f"{root}/{path}", handlers.turn)
        app.router.add_get(f"{root}/models", handlers.models)
        app.router.add_post(f"{root}/messages/count_tokens", handlers.count)
    app.router.add_post("/sessions", handlers.open)
    app.router.add_post("/sessions/{id}/{verb:reward|finish}", handlers.reward)
    app.router.add_route("*", "/{tail:.*}", handlers.unknown)
    # A client that disconnects cancels its turn.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner.cleanup, int(runner.addresses[0][1])


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, gateway: AgentGateway) -> None:
        self._gateway = gateway
        self._joined: dict[tuple[str, str], asyncio.Task[Any]] = {}
        """Turns in progress by session and key of the request."""

    # --- turns ------------------------------------------------------------------------------------

    async def turn(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of any dialect."""
        session = self._session(request)
        dialect = session.dialect(_api_path(request))
        data = await _data(request)
        body = _body(data)
        chat = dialect.read(body)
        key, is_repeated = _request_key(request, data), _is_repeated(request)
        known = session.remembered(key) if is_repeated else None
        if known is None:
            work = self._begin(session, chat, key, is_repeated=is_repeated)
        else:
            work = asyncio.get_running_loop().create_future()
            work.set_result((known, []))
        if chat.stream:
            return await self._stream(request, session, dialect, body, work)
        return _json(dialect.write((await work)[0], body))

    def _begin(
        self, session: AgentSession, chat: Any, key: str, *, is_repeated: bool
    ) -> asyncio.Future[Any]:
        """Start a turn, or join the one that the same request has started."""
        place = session.id, key
        task = self._joined.get(place) if is_repeated else None
        if task is None:
            if self._gateway.is_full:
                raise _RefusedError(
                    429, "too many turns are in progress; try again later", "rate_limit_exceeded"
                )
            prompt, samplings = self._gateway.prepare(session, chat)
            task = self._gateway.begin(session, prompt, samplings, key)
            self._joined[place] = task
            task.add_done_callback(lambda _: self._joined.pop(place, None))
        # A request with a key of its own will be sent again: its turn goes on without a client.
        return asyncio.shield(task) if key.startswith("key:") else task

    async def _stream(
        self,
        request: web.Request,
        session: AgentSession,
        dialect: Dialect,
        body: dict[str, Any],
        work: asyncio.Future[Any],
    ) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        turns: list[Any] = []
        try:
            while not (await asyncio.wait([work], timeout=_PING_S))[0]:
                await response.write(dialect.ping.encode())
            try:
                answer, turns = work.result()
            except Exception as error:  # noqa: BLE001 - the end of a request
                failure = _failure(error, request)
                await response.write(f"event: error\ndata: {failure.text}\n\n".encode())
                return response
            for each in dialect.events(answer, body):
                await response.write(each.encode())
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            # The agent left in the middle: it does not know this turn, nor will it continue it.
            work.cancel()
            session.conversation.withdraw(turns)
            raise
        return response

    # --- other routes -----------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        """List the one model."""
        self._session(request)
        model = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "helmsman"}
        return _json({"object": "list", "data": [model], "has_more": False})

    async def count(self, request: web.Request) -> web.StreamResponse:
        """Count the tokens of a prompt, in Anthropic's form."""
        session = self._session(request)
        chat = DIALECTS["messages"].read({**_body(await _data(request)), "count": True})
        return _json({"input_tokens": session.conversation.prepare(chat).num_tokens})

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Open a session for an outside agent, which has the gateway's key."""
        if not self._gateway.opens_sessions(_key(request)):
            raise _RefusedError(401, "this key opens no sessions", "invalid_api_key")
        body = _body(await _data(request, empty=b"{}"))
        name, metadata = body.get("name"), body.get("metadata") or {}
        if not isinstance(name, str | None) or not isinstance(metadata, dict):
            raise BadRequestError("expected a text as name and an object as metadata")
        session = self._gateway.open_outside(name, metadata)
        if session is None:
            raise _RefusedError(
                429,
                "sessions are ahead of the training as far as its staleness allows; try again "
                "after the next weight update",
                "rate_limit_exceeded",
            )
        return _json({"id": session.id, "base_url": session.base_url, "api_key": session.key})

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Set the reward of a session or of one of its turns; ``finish`` also ends the session."""
        session = self._session(request)
        body = _body(await _data(request, empty=b"{}"))
        ends = request.match_info["verb"] == "finish"
        reward, turn = body.get("reward"), body.get("turn")
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not is_number and not (reward is None and ends):
            raise BadRequestError(f"reward is {reward!r:.40}; expected a number", "reward")
        if turn is not None:
            if not isinstance(turn, int) or not 0 <= turn < session.num_turns:
                raise BadRequestError(
                    f"turn is {turn!r:.40}; the session has {session.num_turns}", "turn"
                )
            session.set_turn_reward(turn, float(reward or 0.0))
        elif reward is not None:
            session.reward = float(reward)
        if ends:
            session.close()
        return _json({"reward": session.reward, "num_turns": session.num_turns})

    async def unknown(self, request: web.Request) -> web.StreamResponse:
        """Refuse any other path."""
        served = ", ".join(f"/v1/{path}" for path in DIALECT_PATHS)
        raise _RefusedError(
            404, f"{request.path[:200]} is not served; expected {served}", "not_found"
        )

    def _session(self, request: web.Request) -> AgentSession:
        session = self._gateway.find(request.match_info.get("id"), _key(request))
        if session is None:
            raise _RefusedError(
                401,
                "the key does not open this session: it is another session's, or the session has "
                "ended",
                "invalid_api_key",
            )
        return session


def _json(body: Any) -> web.Response:
    from aiohttp import web

    return web.json_response(body)


def _api_path(request: web.Request) -> str:
    return request.path.rpartition("/v1/")[2]


def _key(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _data(request: web.Request, empty: bytes = b"") -> bytes:
    """Read a request's body, within limits of time and size."""
    from aiohttp import web

    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read() or empty
    except TimeoutError as error:
        raise _RefusedError(
            408, f"the body did not arrive within {_BODY_S:g} s", "request_timeout"
        ) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _RefusedError(
            413, f"the body is larger than {_MAX_BODY >> 20} MiB", "request_too_large"
        ) from error


def _body(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequestError("the body is no JSON object")
    return found


def _request_key(request: web.Request, data: bytes) -> str:
    given = request.headers.get("Idempotency-Key")
    return f"key:{given}" if given else f"body:{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _is_repeated(request: web.Request) -> bool:
    """Whether the same request may have been received before.

    The vendors' SDKs count their attempts in a header, without a key.
    """
    headers = request.headers
    return "Idempotency-Key" in headers or headers.get("x-stainless-retry-count", "0") != "0"


async def _failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer failed requests in the vendor's form."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # no one reads an answer
    except Exception as error:  # noqa: BLE001 - the end of a request
        return _failure(error, request)


_failures.__middleware_version__ = 1  # type: ignore[attr-defined]


def _failure(error: Exception, request: web.Request) -> web.Response:
    from aiohttp import web

    field, headers, message = "", {}, str(error)
    if isinstance(error, _RefusedError):
        status, code = error.status, error.code
    elif isinstance(error, BadRequestError):
        status, code, field = 400, error.code, error.field
    elif isinstance(error, ValueError):
        status, code = 400, "invalid_request"
    elif isinstance(error, HelmsmanError):
        status, code = 503, "model_unavailable"
        log.warning("a turn failed: %s", error)
    else:
        status, code, message = 500, "internal_error", "the gateway failed; see the script's log"
        log.error("a request failed (%s)", request.path, exc_info=error)
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    dialect = DIALECTS.get(_api_path(request)) or DIALECTS["chat/completions"]
    body = dialect.error(status, message, field=field, code=code)
    return web.json_response(body, status=status, headers=headers)
