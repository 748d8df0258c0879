"""The HTTP server of an AgentGateway: routes, keys, bodies and errors."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from helmsman import HelmsmanError
from helmsman.agents._addresses import listen, url_of_request
from helmsman.agents._dialects.base import Dialect
from helmsman.agents._entrance import BACKLOG, Entrance, Verdict, in_use
from helmsman.agents._messages import BadRequestError
from helmsman.agents._registry import Registry
from helmsman.agents._session import DIALECT_PATHS, DIALECTS, AgentSession
from helmsman.agents._turns import RequestKey, TurnRequest, Turns
from helmsman.api.refusals import RefusalLog

log = logging.getLogger(__name__)

_MAX_BODY = 32 << 20
_BODY_S = 60.0
"""Longest time in seconds for a request's body to arrive."""
_MAX_DEPTH = 200
"""Largest depth of arrays and objects in a body, since templates and encoders recurse into it."""
_PING_S = 10.0
_IDLE_S = 620.0
"""Seconds after which an idle connection ends; longer than those of the usual load balancers, which
would send requests into connections that end."""
_LINGER_S = 1.0
"""Longest time in seconds for the rest of a body whose request was refused. It is dropped."""
_SHUTDOWN_S = 1.0
_RETRY_AFTER_S = 1


async def serve(
    registry: Registry, turns: Turns, host: str, port: int, public_url: str
) -> tuple[Callable[[], Awaitable[None]], str, int]:
    """Start the server on the current event loop.

    Returns:
        A function that ends it, and the address and port that it listens on.

    Raises:
        OSError: It cannot listen there: the port is taken, or the host is not this node's.
    """
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_failures])
    handlers = _Handlers(registry, turns, public_url)
    for root in ("/v1", "/sessions/{id}/v1", "/sessions/{id}/v1/v1"):
        for path in DIALECT_PATHS:
            app.router.add_post(f"{root}/{path}", handlers.turn)
        app.router.add_get(f"{root}/models", handlers.models)
        app.router.add_post(f"{root}/messages/count_tokens", handlers.count)
    app.router.add_post("/sessions", handlers.open)
    app.router.add_post("/sessions/{id}/{verb:reward|finish}", handlers.reward)
    app.router.add_route("*", "/{tail:.*}", handlers.unknown)
    refusals = RefusalLog(functools.partial(log.warning, "agents' gateway: %s"))
    # A client that disconnects cancels its turn.
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_ServerLog(refusals),
        handler_cancellation=True,
        keepalive_timeout=_IDLE_S,
        lingering_time=_LINGER_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        listeners = await listen(host, port, BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:  # the last two: host, port
        await runner.cleanup()
        raise OSError(
            f"the gateway cannot listen (host {host!r}, port {port}): {error}, expected an address "
            "of this node and a free port. Correct host, or use port 0"
        ) from error
    except BaseException:
        await runner.cleanup()
        raise
    bound, port = listeners[0].getsockname()[:2]
    entrance = Entrance(listeners, functools.partial(_verdict, registry), runner.server, refusals)

    async def stop() -> None:
        await entrance.close()
        await runner.cleanup()

    return stop, str(bound), int(port)


class _ServerLog(logging.Logger):
    """Log of aiohttp, whose records have the requests of clients with their keys."""

    def __init__(self, refusals: RefusalLog) -> None:
        super().__init__("helmsman.agents.aiohttp", logging.WARNING)
        self._refusals = refusals

    def handle(self, record: logging.LogRecord) -> None:
        """Count malformed requests; log other errors without values."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            host = str(record.args[0]) if isinstance(record.args, tuple) else "this network"
            self._refusals.note("was refused: it sent a malformed request", host)
        else:
            text = record.getMessage() if error is None else _without_values(error)
            log.error("the gateway's server failed: %s", text)


_REQUEST_LINE = re.compile(rb"[!-~]+ ([!-~]+) HTTP/1\.[01]")


def _verdict(registry: Registry, head: bytes) -> Verdict | None:
    """Return why the first request of a connection is refused; None if it has a key."""
    first, *lines = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None or any(b"\n" in line for line in lines):
        error = BadRequestError("the request is not HTTP/1.1")
        return Verdict(reason="sent a malformed request", answer=_answer("", error))
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.decode("utf-8", "surrogateescape").partition(":")
        headers.setdefault(name.lower(), value.strip())
    if registry.knows(_key(headers)):
        return None
    path = found[1].decode().partition("?")[0]
    return Verdict(reason="showed no valid key", answer=_answer(path, _no_key(path)))


def _no_key(path: str) -> BadRequestError:
    message = "this key cannot open sessions; use the gateway's key"
    if path.strip("/") != "sessions":
        message = (
            "the key does not open this session: it is another session's, or the session has ended"
        )
    return BadRequestError(message, code="invalid_api_key", status=401)


def _answer(path: str, error: BadRequestError) -> bytes:
    """Return a whole response that ends its connection."""
    body = json.dumps(_error_body(path, error.status, str(error), error.field, error.code)).encode()
    return (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        "Content-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, registry: Registry, turns: Turns, public_url: str) -> None:
        self._registry, self._turns, self._public_url = registry, turns, public_url

    async def turn(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of any dialect."""
        session = self._session(request)
        dialect = session.dialect(_api_path(request.path))
        data = await _data(request)
        body = _body(data)
        chat, key = dialect.read(body), _request_key(request, data)
        turn = self._turns.join(session, chat, key)
        with self._turns.waiting(session, turn, key):
            if chat.stream:
                return await self._stream(request, dialect, body, turn)
            response = web.json_response(dialect.write(await turn.answer(), body))
            turn.is_delivered |= request.transport is not None
            return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, body: dict[str, Any], turn: TurnRequest
    ) -> web.StreamResponse:
        """Send events once the turn is done. A turn that fails early has a status of its own."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        while not (await asyncio.wait([turn.task], timeout=_PING_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(dialect.ping.encode())
        try:
            events = "".join(dialect.events(await turn.answer(), body))
        except Exception as error:
            if not response.prepared:
                raise
            events = f"event: error\ndata: {_failure(error, request).text}\n\n"
            await response.write(events.encode())
            return response
        if not response.prepared:
            await response.prepare(request)
        await response.write(events.encode())
        await response.write_eof()
        turn.is_delivered = True
        return response

    async def models(self, request: web.Request) -> web.StreamResponse:
        """List the one model."""
        self._session(request)
        model = {"id": self._turns.model, "object": "model", "created": 0, "owned_by": "helmsman"}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def count(self, request: web.Request) -> web.StreamResponse:
        """Count the tokens of a prompt, in Anthropic's form."""
        session = self._session(request)
        chat = DIALECTS["messages"].read({"max_tokens": 1, **_body(await _data(request))})
        prompt = await asyncio.to_thread(session.conversation.prepare, chat)
        return web.json_response({"input_tokens": len(prompt.ids())})

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Open a session for an outside agent, which has the gateway's key."""
        if not self._registry.opens_sessions(_key(request.headers)):
            raise _no_key(request.path)
        body = _body(await _data(request, empty=b"{}"))
        name, metadata = body.get("name"), body.get("metadata") or {}
        if not isinstance(name, str | None) or not isinstance(metadata, dict):
            raise BadRequestError("name must be a string, and metadata an object")
        url = self._public_url or _url(request)
        session = self._registry.open_outside(name, metadata, url)
        return web.json_response(
            {"id": session.id, "base_url": session.base_url, "api_key": session.key}
        )

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Set the reward of a session or of a turn; ``finish`` also ends an outside session."""
        session = self._session(request)
        body = _body(await _data(request, empty=b"{}"))
        ends = request.match_info["verb"] == "finish"
        reward, turn = body.get("reward"), body.get("turn")
        if not ((reward is None and ends) or _is_number(reward)):
            raise BadRequestError(f"reward is {reward!r:.40}; expected a number", "reward")
        if turn is not None:
            if not isinstance(turn, int) or not 0 <= turn < session.num_turns:
                raise BadRequestError(
                    f"turn is {turn!r:.40}; expected 0 or more, below {session.num_turns}", "turn"
                )
            session.set_turn_reward(turn, float(reward or 0.0))
        elif reward is not None:
            session.reward = float(reward)
        if ends and session.is_outside:  # a script ends the sessions that it has opened
            await asyncio.to_thread(session.close)  # it writes to the disk
        return web.json_response({"reward": session.reward, "num_turns": session.num_turns})

    async def unknown(self, request: web.Request) -> web.StreamResponse:
        """Refuse any other path."""
        served = ", ".join(f"/v1/{path}" for path in DIALECT_PATHS)
        raise BadRequestError(
            f"{request.path[:200]} is not served; expected {served}. A base_url ends with /v1",
            code="not_found",
            status=404,
        )

    def _session(self, request: web.Request) -> AgentSession:
        session = self._registry.find(request.match_info.get("id"), _key(request.headers))
        if session is None:
            raise _no_key(request.path)
        return session


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that fits into a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _url(request: web.Request) -> str:
    """Return the URL by which a request came.

    X-Forwarded-Host and its like are not read, since any client can send them.
    """
    address = ("127.0.0.1", 80)
    if request.transport is not None:
        address = request.transport.get_extra_info("sockname")[:2]
    return url_of_request(request.headers.get("Host", ""), *address)


def _api_path(path: str) -> str:
    return path.rpartition("/v1/")[2]


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def _data(request: web.Request, empty: bytes = b"") -> bytes:
    """Read a request's body, within limits of time and size."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read() or empty
    except TimeoutError as error:
        raise BadRequestError(
            f"the body did not arrive within {_BODY_S:g} s", code="request_timeout", status=408
        ) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequestError(
            f"the body is larger than {_MAX_BODY >> 20} MiB", code="request_too_large", status=413
        ) from error
    except ConnectionError:
        raise
    except Exception as error:  # aiohttp has many errors for bodies that it cannot decode
        raise BadRequestError(f"the body cannot be read: {error}") from error


def _body(data: bytes) -> dict[str, Any]:
    found: Any = None
    try:
        found = json.loads(data, parse_float=_finite, parse_constant=_finite)
        is_deep = isinstance(found, dict) and _is_deep(found)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        # Python's text on long integers ends with advice for the reader's process.
        reason = str(error).partition(";")[0]
        raise BadRequestError(f"the body is not JSON: {reason}") from error
    if is_deep:
        raise BadRequestError(
            f"the body is not JSON of at most {_MAX_DEPTH} levels: its arrays and objects are "
            "nested too deeply. Send a flatter one"
        )
    if not isinstance(found, dict):
        raise BadRequestError("the body is not a JSON object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is not a finite number. Send null instead")
    return number


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _request_key(request: web.Request, data: bytes) -> RequestKey:
    given = request.headers.get("Idempotency-Key")
    digest = hashlib.blake2b(data, digest_size=16).digest()
    # The vendors' SDKs count their attempts in a header, without a key.
    attempts = request.headers.get("x-stainless-retry-count", "0")
    return RequestKey(
        name=f"key:{given}" if given else f"body:{request.path}:{digest.hex()}",
        digest=digest,
        is_given=bool(given),
        is_repeated=bool(given) or attempts != "0",
    )


@web.middleware
async def _failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer failed requests in the vendor's form."""
    try:
        with in_use(request.transport):
            return await handler(request)
    except ConnectionError:
        raise  # no one reads an answer
    except Exception as error:  # noqa: BLE001 - the end of a request
        return _failure(error, request)


def _failure(error: Exception, request: web.Request) -> web.Response:
    field, headers, message = "", {}, str(error)
    if isinstance(error, BadRequestError):
        status, code, field = error.status, error.code, error.field
    elif isinstance(error, ValueError | RecursionError):  # the latter: texts of deep JSON
        status, code = 400, "invalid_request"
    elif isinstance(error, HelmsmanError):
        status, code, message = 503, "model_unavailable", message.partition("\n")[0]
        log.warning("a turn failed: %s", error)
    else:
        status, code, message = 500, "internal_error", "the gateway failed; see the script's log"
        log.error("a request failed (%s): %s", _api_path(request.path), _without_values(error))
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    body = _error_body(request.path, status, message, field, code)
    return web.json_response(body, status=status, headers=headers)


def _error_body(path: str, status: int, message: str, field: str, code: str) -> dict[str, Any]:
    dialect = DIALECTS.get(_api_path(path)) or DIALECTS["chat/completions"]
    return dialect.error(status, message, field=field, code=code)


def _without_values(error: BaseException) -> str:
    """Describe an error without its message, which may have parts of a request."""
    places = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{places}"
