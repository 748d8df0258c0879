"""Rollout engine whose model runs in an inference server, a process that the worker launches.

An update of the whole model ends all generations on the server; each sequence then continues after
its tokens as a new request. The version of every token is therefore exact, and no keys or values of
old weights are used with new ones, at the cost of one more prefill per sequence. An adapter is
loaded beside earlier ones under a name of its own: generations end with the one they began with.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from typing import Any

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import ServerLostError, ServerRequestError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights, WeightsOnDisk
from helmsman.api.workers import worker_context
from helmsman.engines._models.engine_checks import config_from, require_new, running
from helmsman.engines._server import http
from helmsman.engines._server.dialects import DIALECTS
from helmsman.engines._server.http import ServerClient
from helmsman.engines._server.process import ServerProcess, served_model
from helmsman.engines._server.protocol import HttpRequest, ServerConfig, ServerDialect, problem_in
from helmsman.engines._server.weights import (
    as_folder,
    forms_of,
    has_random_weights,
    make_exchange,
    warn_without_room,
)
from helmsman.engines._serving.adapters import TrainedAdapters
from helmsman.engines._serving.generation import check_level, check_samples_of_one
from helmsman.engines._serving.requests import Attempt, Requests
from helmsman.engines._weights.fit import Expected, vocab_size_of
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.shared_base import SharedBase
from helmsman.engines.weights import partial_update, require_base

log = logging.getLogger(__name__)

_ENDING_S = 10.0
"""Seconds that the server has to end paused generations before their connections are closed."""


class ServerEngine(InferenceEngine):
    """A rollout instance served by an inference server process: vLLM's OpenAI server, or SGLang.

    The worker needs one leased port (``SchedulingSpec(port_count=1)``) and the package aiohttp
    (``helmsman-rl[server]``). The server sees the worker's devices, and ends with the worker.

    Args:
        config: The configuration. Alternatively, pass its fields as keyword arguments.
        **fields: Fields of ServerConfig; not allowed together with ``config``.

    Raises:
        ValueError: Both ``config`` and fields are given, a field is unknown, or a value has the
            wrong type (msgspec.ValidationError).
        RuntimeError: The worker has no leased port.
        BackendNotInstalledError: aiohttp is missing.
    """

    def __init__(self, config: ServerConfig | None = None, **fields: Any) -> None:
        self.config = config_from(ServerConfig, config, fields)
        context = worker_context()
        if context is None or not context.ports:
            raise RuntimeError(
                "a ServerEngine needs a leased port, and its worker has none; set "
                "SchedulingSpec(port_count=1)"
            )
        http.library()
        self._host = context.node if self.config.host == "node" else self.config.host
        self._port = context.ports[0]
        self._dialect = DIALECTS[self.config.dialect]()
        self._model = ""
        """Name of the model on the server."""
        self._forms: list[Expected] = []
        """Accepted names and shapes of weights; empty if they are unknown."""
        self._process: ServerProcess | None = None
        self._client: http.ServerClient | None = None
        self._requests: Requests | None = None
        self._adapters: TrainedAdapters | None = None
        """By their names on the server, which are those of their folders in the exchange folder."""
        self._adapter_numbers = itertools.count(1)
        self._base = SharedBase(self)
        self._is_random = has_random_weights(self.config.args)
        """Whether the weights below adapters are neither those of the folder nor of an update."""
        self._is_destroyed = False
        self._state = WeightState.AWAKE
        """The server generates nothing while its weights are incomplete."""
        self._one_update = asyncio.Lock()
        self._exchange = ""
        """Private folder of this engine, from which the server reads weights."""
        self._locks = contextlib.ExitStack()
        self._group: WeightGroup | None = None
        self._weight_thread = concurrent.futures.ThreadPoolExecutor(1, "weights")
        """A single thread, so that collectives keep their order. destroy() does not shut it down:
        an interrupted update still needs it for its cleanup.
        """

    # --- life -------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Launch the server and wait until it is ready; the weights are version 0.

        Raises:
            ServerStartError: The server ended, or was not ready in time; it has been stopped and
                cleaned up.
            ValueError: ``exchange_folder`` or the model's folder does not exist, or the latter's
                files are not those of its model.
            RuntimeError: The engine is running or was destroyed.
        """
        require_new("server engine", is_used=self._process is not None or self._is_destroyed)
        if not os.path.isdir(self.config.exchange_folder):
            raise ValueError(
                f"there is no folder {self.config.exchange_folder!r} on this worker; set "
                "ServerConfig.exchange_folder to one that has room for all weights"
            )
        self._forms = forms_of(self.config.model, self.config.args)
        warn_without_room(self.config.model, self.config.exchange_folder)
        # Hexadecimal, because a key that starts with a hyphen would be parsed as an option.
        key = secrets.token_hex(24)
        address = f"{'127.0.0.1' if self._host == '0.0.0.0' else self._host}:{self._port}"
        self._exchange, lock = make_exchange(self.config.exchange_folder)
        with contextlib.ExitStack() as undo:
            self._locks.callback(os.close, lock)
            undo.callback(shutil.rmtree, self._exchange, ignore_errors=True)
            self._process = process = ServerProcess(
                self._dialect.command(self.config, self._host, self._port, key),
                {
                    "PYTHONUNBUFFERED": "1",
                    **self._dialect.environment(self.config, key),
                    **self.config.env,
                },
                stop_timeout_s=self.config.stop_timeout_s,
                folder=self._exchange,
                secret=key,
                on_end=self._on_server_end,
            )
            undo.callback(process.stop)
            headers = {"Authorization": f"Bearer {key}"}
            process.wait_ready(
                address, self._dialect.health_route, headers, self.config.start_timeout_s
            )
            model = served_model(address, headers, self.config.control_timeout_s)
            undo.pop_all()

        def lost(reason: str) -> ServerLostError:
            how = process.how_it_ended() if process.has_ended else reason
            return ServerLostError(
                address=address,
                reason=how,
                exit_code=process.exit_code,
                log_tail=process.log_tail(),
            )

        def has_ended() -> bool:
            return process.has_ended

        self._model = model["id"]
        self._client = http.ServerClient(
            address,
            key,
            self._dialect.health_route,
            retry_s=self.config.retry_s,
            has_ended=has_ended,
            lost=lost,
        )
        self._make_requests = functools.partial(
            Requests,
            has_ended=has_ended,
            max_model_len=model.get("max_model_len"),
            vocab_size=vocab_size_of(self.config.model),
            samples_together=self._dialect.samples_together,
            forget=self._forget,
        )
        self._requests = self._make_requests(self._read)
        self._adapters = TrainedAdapters(self._requests, self._unload)

    def beside(self) -> ServerEngine:
        """Return the engine of another policy on the server, with adapters and requests of its own.

        It is a copy with the same client and lock. Meanwhile the state of both does not change.

        Raises:
            RuntimeError: This engine is not running.
            ServerLostError: The server has ended.
            ValueError: The server is asleep, has received a whole model, or has no room for the
                adapters of another policy.
        """
        self._running().require_server()
        other: ServerEngine = self._base.beside(self, self.config.max_loras)
        other._group, other._locks = None, contextlib.ExitStack()
        other._requests = self._make_requests(other._read, policy=f"-{next(self._adapter_numbers)}")
        other._adapters = TrainedAdapters(other._requests, self._unload)
        return other

    def destroy(self) -> None:
        """Stop the server, within ``stop_timeout_s`` and a few seconds. Idempotent.

        Raises:
            TimeoutError: A process of the server is still alive after SIGKILL.
        """
        self._is_destroyed = True
        client, requests, first = self._client, self._requests, self._base.leave(self)
        if first is not None:
            self._process = None  # which is the first policy's
        try:
            if (
                client is not None
                and requests is not None
                and client.loop is not None
                and client.loop.is_running()
            ):
                leaving = asyncio.run_coroutine_threadsafe(
                    self._leave(client, requests, first), client.loop
                )
                with contextlib.suppress(TimeoutError):
                    # The loop is busy; the requests fail when the server ends.
                    leaving.result(self.config.stop_timeout_s)
        finally:
            self._client = None
            if self._process is not None:
                self._process.stop()
            if self._group is not None:
                self._group.close()
            self._locks.close()

    async def _leave(
        self, client: http.ServerClient, requests: Requests, first: ServerEngine | None
    ) -> None:
        await requests.abort(None)
        self._client = None
        if first is None:
            await client.close()
        elif self._adapters is not None and first._adapters is not None:
            await self._adapters.end(first._adapters)

    def get_version(self) -> int:
        """Return the weight version that is served; 0 before initialize()."""
        return self._requests.version if self._requests is not None else 0

    def failure(self) -> str | None:
        """Return why the server can no longer serve, or None while it can."""
        if self._process is None or not self._process.has_ended or self._is_destroyed:
            return None
        return f"its inference server has ended: {self._process.how_it_ended()}"

    def server_pid(self) -> int:
        """Return the process id of the server.

        Raises:
            RuntimeError: The engine was not initialized.
        """
        return running("server engine", self._process).pid

    async def stats(self) -> dict[str, float]:
        """Return counters of the server and the engine.

        Returns:
            ``num_running`` and ``num_waiting`` requests of the server; ``kv_cache_usage``, a
            fraction from 0 to 1; ``num_generated_tokens`` received from it so far; and the weight
            ``version``.

        Raises:
            RuntimeError: The engine is not running.
            ServerLostError: The server has ended or its connection broke.
            ServerRequestError: The server refused the request.
        """
        text = (
            await self._running().call("GET", "/metrics", limit_s=self.config.control_timeout_s)
        ).decode()
        return {
            **self._dialect.stats.values_in(text),
            "num_generated_tokens": self._served().num_generated_tokens,
            "version": self._served().version,
        }

    def _on_server_end(self) -> None:
        client, requests = self._client, self._requests
        if client is not None and requests is not None and client.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already stopped
                asyncio.run_coroutine_threadsafe(requests.notify(), client.loop)

    def _running(self) -> http.ServerClient:
        return running("server engine", self._client)

    def _served(self) -> Requests:
        self._running()
        assert self._requests is not None
        return self._requests

    async def _send(self, calls: Sequence[HttpRequest]) -> None:
        client = self._running()
        for call in calls:
            answer = await client.call(
                "POST",
                call.route,
                body=call.body,
                params=call.params,
                limit_s=self.config.control_timeout_s,
                busy_status=call.busy_status,
            )
            if (problem := problem_in(answer)) is not None:
                await client.refuse(call.route, 200, problem, "success")

    # --- generation -------------------------------------------------------------------------------

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt; concurrent calls are batched by the server.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the
                request id is already in flight.
            RuntimeError: The engine is asleep or not running.
            ServerLostError: The server has ended or its connection broke.
            ServerRequestError: The server refused the request.
        """
        return (await self._generate([request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times.

        vLLM gets one request for all samples if they have no seeds. Otherwise each sample is a
        request, and the server's prefix cache holds the prompt.

        Args:
            requests: Requests that differ only in id and seed.

        Returns:
            Results in the order of the requests, when all have ended.

        Raises:
            ValueError: The prompts differ, or a request is invalid; see agenerate.
            RuntimeError: The engine is asleep or not running.
            ServerLostError: The server has ended or its connection broke.
            ServerRequestError: The server refused a request.
        """
        check_samples_of_one(requests)
        return await self._generate(requests)

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        if not self._state.has_cache:
            self._running().require_server()  # wake() would not help
            raise RuntimeError(
                f"a request arrived while the server is {self._state.value}; call wake() first"
            )
        self._running()
        assert self._adapters is not None
        return await self._adapters.generate(requests)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End the given requests (None: all) with stop_reason 'abort'; return their number."""
        return await self._served().abort(request_ids)

    async def _read(self, attempt: Attempt) -> None:
        call = self._dialect.generation(self._model, attempt)
        await read_attempt(self._running(), self._dialect, call, attempt, self._served())

    async def _forget(self, attempt: Attempt) -> None:
        """Abort an attempt on a server that ignores closed connections."""
        call = self._dialect.abort(attempt.request_id)
        if call is not None and self._client is not None and not self._client.is_closed:
            with contextlib.suppress(ServerRequestError, ServerLostError, TimeoutError):
                # Best effort: the tokens received so far are valid without it.
                await self._send([call])

    # --- weights ----------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Load new weights into the server and serve them as ``version``.

        The server generates with the old weights while the new ones arrive. Weights that are not a
        folder of files are first written to ``exchange_folder``. An adapter is for new requests
        only; those in flight end with the one they began with, and its version.

        Args:
            weights: All parameters by Hugging Face name, of any dtype and device, or an adapter by
                its names in PEFT's files: in memory, as files, or received by broadcasts.
            version: Their version.

        Returns:
            The version served.

        Raises:
            ValueError: Names or shapes do not fit the model, which is unchanged; or an adapter's
                rank is above ``max_lora_rank``, or the model below it is random.
            RuntimeError: The engine is asleep, or the model below an adapter is gone. Or the update
                failed half-way (PartialWeightUpdateError): the engine generates nothing until an
                update succeeds.
            ConnectionError: A member of the weight-sync group is missing or late.
            OSError: The files cannot be read, or ``exchange_folder`` has no room.
            ServerLostError: The server has ended or its connection broke.
            ServerRequestError: The server refused the adapter.
        """
        requests, adapters = self._served(), self._adapters
        assert adapters is not None
        async with self._one_update:
            if not self._state.has_weight_memory:
                self._running().require_server()
                raise RuntimeError(
                    "the server is asleep and has no memory for weights; call "
                    "wake(weights_only=True) first"
                )
            async with self._laid_out(weights) as (path, is_adapter):
                if is_adapter:
                    await adapters.serve(await self._load_adapter(path, version), version)
                    return version
                self._base.require_alone("a whole model")
                self._base.change()
                async with self._paused(requests):
                    self._on(WeightEvent.TORN)
                    try:
                        await self._send(self._dialect.load(path))
                    except ServerLostError:
                        raise
                    except Exception as error:
                        raise partial_update(error) from error
                    self._on(WeightEvent.UPDATED)
                    self._is_random = False
                    await adapters.serve(None, version)
        return version

    async def _load_adapter(self, path: str, version: int) -> str:
        """Load an adapter from a folder, which is moved; return its name."""
        require_base(is_whole=self._state.is_whole, is_random=self._is_random)
        name = f"version-{version}.{next(self._adapter_numbers)}"
        # The server may read the folder again as long as requests use the adapter.
        kept = os.path.join(self._exchange, name)
        os.rename(path, kept)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, kept, ignore_errors=True)
            await self._send([self._dialect.load_adapter(name, kept)])
            undo.pop_all()
        return name

    async def _unload(self, name: str) -> None:
        try:
            await self._send([self._dialect.unload_adapter(name)])
        except (ServerRequestError, TimeoutError) as error:
            log.warning("the adapter %s may stay in the memory of the server: %s", name, error)
        shutil.rmtree(os.path.join(self._exchange, name), ignore_errors=True)

    @contextlib.asynccontextmanager
    async def _laid_out(self, weights: Weights) -> AsyncIterator[tuple[str, bool]]:
        loop, client = asyncio.get_running_loop(), self._running()
        if self._group is None:
            self._group = WeightGroup(current_platform.device(0))
        folder = as_folder(
            weights, self._group, self._forms, self._exchange, self.config.max_lora_rank
        )
        try:
            laid_out = await loop.run_in_executor(self._weight_thread, folder.__enter__)
        except FileNotFoundError:
            if not isinstance(weights, WeightsOnDisk):
                # The server's guard removes the exchange folder before its own end is detected.
                await client.wait_end()
                client.require_server()
            raise
        try:
            yield laid_out
        finally:
            await loop.run_in_executor(self._weight_thread, folder.__exit__, None, None, None)

    @contextlib.asynccontextmanager
    async def _paused(self, requests: Requests) -> AsyncIterator[None]:
        """Pause generation during the block; then resume unless the weights are incomplete."""
        if not self._state.has_cache:
            yield
            return
        requests.hold()
        try:
            await self._send(self._dialect.pause())
            # An attempt without tokens may have reached the server after the pause; it would wait
            # there until the server resumes.
            requests.close_attempts(begun=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await requests.until_ended()
            requests.close_attempts(begun=True)
            yield
        except BaseException:
            if self._state.is_whole and not self._is_destroyed:
                with contextlib.suppress(ServerRequestError, ServerLostError, TimeoutError):
                    # The first error is the one to raise.
                    await self._send(self._dialect.resume())
            raise
        else:
            await self._send(self._dialect.resume())
        finally:
            await self._go_on()

    # --- sleep ------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """Release device memory; needs ``ServerConfig.sleep``.

        Args:
            level: 1 drops the cache and keeps the weights on the host; 2 drops the weights too.

        Raises:
            ValueError: The level is not 1 or 2.
            RuntimeError: Requests are in flight, or the server was started without
                ``ServerConfig.sleep``.
            ServerLostError: The server has ended or its connection broke.
        """
        requests = self._served()
        check_level(level)
        self._base.require_alone("sleep()")
        if not self.config.sleep:
            raise RuntimeError(
                "this server was started without support for sleep; set ServerConfig.sleep"
            )
        async with self._one_update:
            if requests.generations:
                raise RuntimeError(
                    f"{len(requests.generations)} requests are in flight; let them end, or abort "
                    "them, before sleep()"
                )
            self._base.change()
            if self._state.has_weight_memory:
                self._on(WeightEvent.SLEPT)
                await self._send(self._dialect.sleep(level))
            if level == 2:
                self._on(WeightEvent.DROPPED)

    async def wake(self, *, weights_only: bool = False) -> None:
        """Allocate the device memory again.

        Args:
            weights_only: Restore only the weights, so that an update can be loaded; a second wake()
                without it allocates the cache.
        """
        self._running()
        async with self._one_update:
            needs_cache = not self._state.has_cache and not weights_only
            await self._send(
                self._dialect.wake(weights=not self._state.has_weight_memory, cache=needs_cache)
            )
            self._on(WeightEvent.WOKE_WEIGHTS if weights_only else WeightEvent.WOKE)
            await self._go_on()

    def _on(self, event: WeightEvent) -> None:
        self._state = self._state.after(event)
        if not self._state.is_whole and self._requests is not None:
            self._requests.hold()

    async def _go_on(self) -> None:
        if self._state.is_serving and self._requests is not None:
            await self._requests.release()


async def read_attempt(
    client: ServerClient,
    dialect: ServerDialect,
    call: HttpRequest,
    attempt: Attempt,
    requests: Requests,
) -> None:
    """Send an attempt and add its tokens to the requests, until the server has ended all of it.

    Raises:
        ServerRequestError: The server refused the call, or its events are malformed.
        ServerLostError: The server has ended or its connection broke.
    """
    counts = [0] * len(attempt.generations)
    async with contextlib.aclosing(client.events(call.route, call.body)) as events:
        async for event in events:
            try:
                chunks = dialect.chunks(event, counts)
                if unknown := [
                    chunk.sample for chunk in chunks if not 0 <= chunk.sample < len(counts)
                ]:
                    raise ValueError(
                        f"it is for sample {unknown[0]}, but the request was for "
                        f"{len(counts)}, counted from 0"
                    )
            except ValueError as error:
                await client.refuse(
                    call.route, 200, str(error), "tokens with their log-probabilities"
                )
            for chunk in chunks:
                requests.take(
                    attempt, chunk.sample, chunk.token_ids, chunk.logprobs, chunk.stop_reason
                )
                counts[chunk.sample] += len(chunk.token_ids)
    unended = [count for index, count in enumerate(counts) if index not in attempt.has_ended]
    # vLLM sends nothing for a sequence that a pause has ended before its first token.
    if any(unended) or (unended and not requests.is_held):
        said = "the events ended before the sequences did"
        await client.refuse(call.route, 200, said, "a reason for the end of each")
