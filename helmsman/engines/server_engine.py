"""ServerEngine: a rollout instance whose model runs in an inference server, a process that the worker launches.

An update of the weights ends what the server generates; afterwards each sequence goes on from its tokens, as a new request. So
the version of every token is known exactly, and nothing that was computed by old weights is used by new ones. It costs the
prompts of what runs once more, which the server would have to compute again for new keys and values in any case.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import ServerLostError, ServerRequestError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights
from helmsman.api.workers import worker_context
from helmsman.engines._admission import check_samples_of_one
from helmsman.engines._server import http
from helmsman.engines._server.dialects import dialect_of
from helmsman.engines._server.process import ServerProcess, get
from helmsman.engines._server.protocol import Call, ServerConfig, problem_in
from helmsman.engines._server.requests import ServedRequests
from helmsman.engines._server.weights import as_folder, forms_of, make_exchange, vocab_size_of
from helmsman.engines._vllm.fit import Expected
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weights import PartialWeightUpdateError

_UPDATE, _WEIGHTS = "an update", "missing weights"
"""Who has it that nothing is sent to the server."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class ServerEngine(InferenceEngine):
    """A rollout instance that is a server process: vLLM's OpenAI server, or SGLang.

    The worker needs one leased port (``SchedulingSpec(port_count=1)``), and the package aiohttp (``helmsman[server]``). The
    server sees the worker's devices, and ends with the worker.

    Args:
        config: The configuration; or give its fields as keyword arguments.

    Raises:
        ValueError: Unknown fields, or values of another type (msgspec.ValidationError).
        RuntimeError: The worker has no leased port.
        BackendNotInstalledError: aiohttp is missing.
    """

    def __init__(self, config: ServerConfig | None = None, **fields: Any) -> None:
        if config is not None and fields:
            raise ValueError(f"give either a ServerConfig or its fields, not both (fields: {', '.join(fields)})")
        self.config = config if config is not None else msgspec.convert(fields, ServerConfig)
        context = worker_context()
        if context is None or not context.ports:
            raise RuntimeError(
                "a ServerEngine binds a port that is leased to its worker, and this one has none; ask for it by "
                "SchedulingSpec(port_count=1)"
            )
        http.library()
        self._host = context.node if self.config.host == "node" else self.config.host
        self._port = context.ports[0]
        self._dialect = dialect_of(self.config)
        self._vocab_size = vocab_size_of(self.config.model)
        self._forms: list[Expected] = []
        """What weights look like that fit the model."""
        self._process: ServerProcess | None = None
        self._client: http.ServerClient | None = None
        self._requests: ServedRequests | None = None
        self._is_destroyed = False
        self._state = WeightState.AWAKE
        """Without whole weights the server generates nothing."""
        self._one_update = asyncio.Lock()
        self._exchange = ""
        """A folder of this engine's own, where weights are laid for the server."""
        self._locks = contextlib.ExitStack()
        self._group: WeightGroup | None = None
        self._weight_thread = concurrent.futures.ThreadPoolExecutor(1, "weights")
        """One, as collectives keep their order. Not shut down by destroy: an update that is interrupted needs it to its end."""

    # --- life -------------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Launch the server and wait until it is ready; the weights are version 0.

        Raises:
            ServerStartError: It ended, or was not ready in time; nothing of it is left.
            ValueError: There is no ``exchange_folder``.
            RuntimeError: The engine is running or was destroyed.
        """
        if self._process is not None or self._is_destroyed:
            raise RuntimeError("initialize() was called on a server engine that is running or destroyed; make a new one")
        if not os.path.isdir(self.config.exchange_folder):
            raise ValueError(
                f"there is no folder {self.config.exchange_folder!r} on this worker; set ServerConfig.exchange_folder to one "
                "that has room for all weights"
            )
        self._forms = forms_of(self.config.model)
        key = secrets.token_hex(24)  # which never begins with the hyphen of an argument, as other alphabets may
        address = f"{'127.0.0.1' if self._host == '0.0.0.0' else self._host}:{self._port}"
        self._exchange, lock = make_exchange(self.config.exchange_folder)
        with contextlib.ExitStack() as undo:
            self._locks.callback(os.close, lock)
            undo.callback(shutil.rmtree, self._exchange, ignore_errors=True)
            self._process = process = ServerProcess(
                self._dialect.command(self.config, self._host, self._port, key),
                {"PYTHONUNBUFFERED": "1", **self._dialect.environment(self.config, key), **self.config.env},
                stop_timeout_s=self.config.stop_timeout_s,
                folder=self._exchange,
                secret=key,
                on_end=self._on_server_end,
            )
            undo.callback(process.stop)
            headers = {"Authorization": f"Bearer {key}"}
            process.wait_ready(address, self._dialect.health_route, headers, self.config.start_timeout_s)
            model = _model_at(address, headers, self.config.control_timeout_s)
            undo.pop_all()

        def lost(reason: str) -> ServerLostError:
            how = process.how_it_ended() if process.has_ended else reason
            return ServerLostError(address=address, reason=how, exit_code=process.exit_code, log_tail=process.log_tail())

        self._client = http.ServerClient(
            address,
            key,
            self._dialect.health_route,
            retry_s=self.config.retry_s,
            has_ended=lambda: process.has_ended,
            lost=lost,
        )
        self._requests = ServedRequests(
            self._client,
            self._dialect,
            model=model.id,
            max_model_len=model.max_model_len,
            vocab_size=self._vocab_size,
            has_ended=lambda: process.has_ended,
            control_timeout_s=self.config.control_timeout_s,
        )

    def destroy(self) -> None:
        """End the server, within ``stop_timeout_s`` and a few seconds. Idempotent.

        Raises:
            TimeoutError: Something of it is left, although it was killed.
        """
        self._is_destroyed = True
        client, requests = self._client, self._requests
        try:
            if client is not None and requests is not None and client.loop is not None and client.loop.is_running():
                leaving = asyncio.run_coroutine_threadsafe(self._leave(client, requests), client.loop)
                with contextlib.suppress(TimeoutError):  # something else holds the loop; the server's end is their end
                    leaving.result(self.config.stop_timeout_s)
        finally:
            self._client = None
            if self._process is not None:
                self._process.stop()
            if self._group is not None:
                self._group.close()
            self._locks.close()

    async def _leave(self, client: http.ServerClient, requests: ServedRequests) -> None:
        await requests.abort(None)
        self._client = None
        await client.close()

    def get_version(self) -> int:
        """The weight version that is served."""
        return self._requests.version if self._requests is not None else 0

    def failure(self) -> str | None:
        """See InferenceEngine."""
        if self._process is None or not self._process.has_ended or self._is_destroyed:
            return None
        return f"its inference server has ended: {self._process.how_it_ended()}"

    def server_pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise RuntimeError("the server engine is not running; call initialize() first")
        return self._process.pid

    async def stats(self) -> dict[str, float]:
        """``num_running`` and ``num_waiting`` requests of the server, ``kv_cache_usage`` from 0 to 1; ``num_generated_tokens``
        that came from it so far; and the ``version``."""
        text = (await self._running().call("GET", "/metrics", limit_s=self.config.control_timeout_s)).decode()
        names = self._dialect.stats._asdict()
        gauges = {ours: _gauge(text, theirs) for ours, theirs in names.items()}
        return {**gauges, "num_generated_tokens": self._served().num_generated_tokens, "version": self._served().version}

    def _on_server_end(self) -> None:
        """Have those see it who wait for the server to serve."""
        client, requests = self._client, self._requests
        if client is not None and requests is not None and client.loop is not None:
            with contextlib.suppress(RuntimeError):  # the worker has stopped its loop already
                asyncio.run_coroutine_threadsafe(requests.notify(), client.loop)

    def _running(self) -> http.ServerClient:
        if self._client is None:
            raise RuntimeError("the server engine is not running; call initialize() first, and nothing after destroy()")
        return self._client

    def _served(self) -> ServedRequests:
        self._running()
        assert self._requests is not None
        return self._requests

    async def _tell(self, calls: Sequence[Call]) -> None:
        client = self._running()
        for call in calls:
            answer = await client.call(
                "POST", call.route, body=call.body, params=call.params, limit_s=self.config.control_timeout_s
            )
            if (problem := problem_in(answer)) is not None:
                await client.refuse(call.route, 200, problem, "success")

    # --- generation -------------------------------------------------------------------------------------------------------

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt; many calls are in flight at once and are batched by the server.

        Only ``stop_token_ids`` end a sequence early: the model's own end token is not among them unless it is named.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the id is in flight already.
            ServerLostError: The server has ended, or its connection broke.
            ServerRequestError: It refused the request.
            RuntimeError: The engine is asleep, or does not run.
        """
        self._require_awake()
        return (await self._served().generate([request]))[0]

    async def agenerate_samples(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Continue one prompt several times. One request of vLLM has them all where they have no seeds; otherwise each is a
        request, and the server's prefix cache has the prompt.

        Returns:
            Their results in the order of the requests, when all have ended.

        Raises:
            ValueError: As agenerate, or the prompts are not the same.
        """
        check_samples_of_one(requests)
        self._require_awake()
        return await self._served().generate(requests)

    def _require_awake(self) -> None:
        if not self._state.has_cache:
            raise RuntimeError(f"a request came while the server is {self._state.value}; call wake() first")

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all) early; each returns what it has with stop_reason 'abort'. Unknown ids are passed over.

        Returns:
            How many were ended.
        """
        return await self._served().abort(request_ids)

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Take new parameters and serve them as ``version``. The server generates by the old ones while the new ones come; what
        runs then goes on by the new ones.

        Args:
            weights: By Hugging Face name, in memory or wherever they come from; what is no folder of files is laid into
                ``exchange_folder`` for the server to read.
            version: Their version.

        Returns:
            The version that is served.

        Raises:
            ValueError: Names or shapes do not fit the model; the server was left as it was.
            RuntimeError: The server is asleep. Or it ended half-way (PartialWeightUpdateError): nothing is generated until
                an update is completed, and abort gives requests back.
            ConnectionError: The other members of the group for weights are gone or late, or the server is lost.
            OSError: The files cannot be read, or there is no room for them.
        """
        requests = self._served()
        async with self._one_update:
            if not self._state.has_weight_memory:
                raise RuntimeError("the server is asleep, and has no room for weights; call wake(weights_only=True) first")
            async with self._laid_out(weights) as path, self._paused(requests):
                self._on(WeightEvent.TORN)
                requests.hold(_WEIGHTS)
                try:
                    await self._tell(self._dialect.load(path))
                except ServerLostError:
                    raise
                except Exception as error:
                    raise PartialWeightUpdateError(
                        f"the server may have exchanged its weights in part: {type(error).__name__}: {error} Nothing is "
                        "generated by them until an update is completed."
                    ) from error
                self._on(WeightEvent.UPDATED)
                requests.version = version
            await requests.let_go(_WEIGHTS)
        return version

    @contextlib.asynccontextmanager
    async def _laid_out(self, weights: Weights) -> AsyncIterator[str]:
        """Weights as a folder."""
        loop = asyncio.get_running_loop()
        if self._group is None:
            self._group = WeightGroup(current_platform.device(0))
        folder = as_folder(weights, self._group, self._forms, self._exchange)
        path = await loop.run_in_executor(self._weight_thread, folder.__enter__)
        try:
            yield path
        finally:
            await loop.run_in_executor(self._weight_thread, folder.__exit__, None, None, None)

    @contextlib.asynccontextmanager
    async def _paused(self, requests: ServedRequests) -> AsyncIterator[None]:
        """While the server generates nothing; it goes on afterwards, unless it has no whole weights."""
        if not self._state.has_cache:
            yield
            return
        requests.hold(_UPDATE)
        requests.keep_what_the_server_ends(True)
        try:
            await self._tell(self._dialect.pause())
            await requests.until_none_runs()
            yield
        except BaseException:
            if self._state.is_whole and not self._is_destroyed:
                with contextlib.suppress(ServerRequestError, ServerLostError, TimeoutError):  # the first error counts
                    await self._tell(self._dialect.resume())
            raise
        else:
            await self._tell(self._dialect.resume())
        finally:
            requests.keep_what_the_server_ends(False)
            await requests.let_go(_UPDATE)

    # --- sleep ------------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """See InferenceEngine; for a server that was started with ``ServerConfig.sleep``.

        Raises:
            ValueError: Another level than 1 or 2.
            RuntimeError: Requests are in flight, or the server was not started so that it can sleep.
        """
        requests = self._served()
        if level not in (1, 2):
            raise ValueError(f"level is {level}; expected 1 (the weights wait on the host) or 2 (they are dropped)")
        if not self.config.sleep:
            raise RuntimeError("this server was not started so that it can sleep; set ServerConfig.sleep")
        async with self._one_update:
            if requests.sequences:
                raise RuntimeError(
                    f"{len(requests.sequences)} requests are in flight; let them end, or abort them, before sleep()"
                )
            if self._state.has_weight_memory:
                self._on(WeightEvent.SLEPT)
                await self._tell(self._dialect.sleep(level))
            if level == 2:
                self._on(WeightEvent.DROPPED)
                requests.hold(_WEIGHTS)

    async def wake(self, *, weights_only: bool = False) -> None:
        """See InferenceEngine."""
        self._running()
        async with self._one_update:
            needs_cache = not self._state.has_cache and not weights_only
            await self._tell(self._dialect.wake(weights=not self._state.has_weight_memory, cache=needs_cache))
            self._on(WeightEvent.WOKE_WEIGHTS if weights_only else WeightEvent.WOKE)

    def _on(self, event: WeightEvent) -> None:
        self._state = self._state.after(event)


def _model_at(address: str, headers: Mapping[str, str], limit_s: float) -> _Model:
    route = "/v1/models"
    status, answer = get(address, route, headers, limit_s)
    if status != 200:
        raise ServerRequestError(
            address=address,
            route=route,
            status=status,
            answer=answer.decode(errors="replace")[:2000],
            expected="200 with its models",
            step="Look whether it is of ServerConfig.dialect, and whether another program listens there",
        )
    return msgspec.json.decode(answer, type=_Models).data[0]


def _gauge(metrics: str, name: str) -> float:
    """The value of a gauge in Prometheus' text, summed over its labels."""
    values = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(map(float, values))
