"""ServerEngine: a rollout instance whose model runs in an inference server, a process that the worker launches.

An update of the weights ends what the server generates; afterwards each sequence goes on from its tokens, as a new request. So
the version of every token is known exactly, and nothing that was computed by old weights is used by new ones. It costs the
prompts of what runs once more, which the server would have to compute again for new keys and values in any case.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import itertools
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import ServerError, ServerLostError, ServerRequestError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weights import Weights
from helmsman.api.worker_context import worker_context
from helmsman.engines import server_http
from helmsman.engines.server_dialects import Call, Chunk, ServerConfig, dialect_of
from helmsman.engines.server_process import ServerProcess, get
from helmsman.engines.server_sequences import Part, ServedSequence
from helmsman.engines.server_weights import as_folder, forms_of, vocab_size_of
from helmsman.engines.vllm_fit import Expected
from helmsman.engines.weight_group import WeightGroup
from helmsman.engines.weights import TornWeightsError

_ENDING_S = 10.0
"""How long the server has to say that it has ended what a pause ended, before its connections are closed."""


class _Awake(enum.Enum):
    """Which memory the server has."""

    ALL = "awake"
    WEIGHTS = "awake for its weights alone"
    NOTHING = "asleep"


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
        server_http.library()
        self._host = context.node if self.config.host == "node" else self.config.host
        self._port = context.ports[0]
        self._dialect = dialect_of(self.config)
        self._vocab_size = vocab_size_of(self.config.model)
        self._forms: list[Expected] = []
        """What weights look like that fit the model."""
        self._process: ServerProcess | None = None
        self._client: server_http.ServerClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """On which requests come."""
        self._model = _Model("")
        self._is_destroyed = False
        self._version = 0
        self._sequences: dict[str, ServedSequence] = {}
        self._parts: set[Part] = set()
        self._numbers = itertools.count()
        self._num_generated_tokens = 0
        self._awake = _Awake.ALL
        self._needs_weights = False
        """Whether the server generates nothing until an update."""
        self._is_updating = False
        self._changed = asyncio.Condition()
        self._one_update = asyncio.Lock()
        self._exchange = ""
        """A folder of this engine's own, where weights are laid for the server."""
        self._group: WeightGroup | None = None
        self._weight_thread = concurrent.futures.ThreadPoolExecutor(1, "weights")  # one, as collectives keep their order

    # --- life -------------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Launch the server and wait until it is ready; the weights are version 0.

        Raises:
            ServerStartError: It ended, or was not ready in time; nothing of it is left.
            RuntimeError: The engine is running or was destroyed.
        """
        if self._process is not None or self._is_destroyed:
            raise RuntimeError("initialize() was called on a server engine that is running or destroyed; make a new one")
        self._forms = forms_of(self.config.model)
        key = secrets.token_urlsafe(24)
        address = f"{'127.0.0.1' if self._host == '0.0.0.0' else self._host}:{self._port}"
        self._exchange = tempfile.mkdtemp(prefix="helmsman-weights.", dir=self.config.exchange_folder)
        with contextlib.ExitStack() as undo:
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
            self._model = _model_at(address, headers, self.config.control_timeout_s)
            undo.pop_all()

        def lost(reason: str) -> ServerLostError:
            how = process.how_it_ended() if process.has_ended else reason
            return ServerLostError(address=address, reason=how, exit_code=process.exit_code, log_tail=process.log_tail())

        self._client = server_http.ServerClient(
            address,
            key,
            self._dialect.health_route,
            retry_s=self.config.retry_s,
            has_ended=lambda: process.has_ended,
            lost=lost,
        )

    def destroy(self) -> None:
        """End the server, within ``stop_timeout_s`` and a few seconds. Idempotent.

        Raises:
            TimeoutError: Something of it is left, although it was killed.
        """
        self._is_destroyed = True
        client, loop = self._client, self._loop
        try:
            if client is not None and loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(self._leave(client), loop).result(self.config.stop_timeout_s)
        finally:
            self._client = None
            if self._process is not None:
                self._process.stop()
            if self._group is not None:
                self._group.close()
            self._weight_thread.shutdown(wait=False)

    async def _leave(self, client: server_http.ServerClient) -> None:
        await self.abort()
        self._client = None
        await client.close()

    def get_version(self) -> int:
        """The weight version that is served."""
        return self._version

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
        return {**gauges, "num_generated_tokens": self._num_generated_tokens, "version": self._version}

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.has_ended

    def _on_server_end(self) -> None:
        """Have those see it who wait for the server to serve."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the worker has stopped its loop already
                asyncio.run_coroutine_threadsafe(self._notify(), self._loop)

    def _running(self) -> server_http.ServerClient:
        if self._client is None:
            raise RuntimeError("the server engine is not running; call initialize() first, and nothing after destroy()")
        return self._client

    async def _tell(self, calls: Sequence[Call]) -> None:
        client = self._running()
        for call in calls:
            answer = await client.call(
                "POST", call.route, body=call.body, params=call.params, limit_s=self.config.control_timeout_s
            )
            if (problem := self._dialect.problem(answer)) is not None:
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
        return (await self._generate([request]))[0]

    async def agenerate_samples(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Continue one prompt several times. One request of vLLM has them all where they have no seeds; otherwise each is a
        request, and the server's prefix cache has the prompt.

        Returns:
            Their results in the order of the requests, when all have ended.

        Raises:
            ValueError: As agenerate, or the prompts are not the same.
        """
        for request in requests:
            if request.prompt_ids != requests[0].prompt_ids:
                raise ValueError(
                    f"requests {requests[0].request_id!r} and {request.request_id!r} have different prompts; "
                    "agenerate_samples takes samples of one"
                )
        return await self._generate(requests)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all) early; each returns what it has with stop_reason 'abort'. Unknown ids are passed over.

        Returns:
            How many were ended.
        """
        self._running()
        found = list(self._sequences) if request_ids is None else request_ids
        num_ended = sum(self._sequences[id_].end("abort") for id_ in found if id_ in self._sequences)
        for part in [part for part in self._parts if not part.is_wanted]:
            part.close()
        await self._notify()
        return num_ended

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self._running()
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            sequences = [self._admit(request, stack) for request in requests]
            sampling = [sequence.request.sampling for sequence in sequences]
            if (
                len(sequences) > 1
                and self._dialect.samples_together
                and all(s == sampling[0] and s.seed is None for s in sampling)
            ):
                await self._run_part(sequences)
            outcomes = await asyncio.gather(*map(self._to_its_end, sequences), return_exceptions=True)
            for error in outcomes:
                if error is not None:
                    raise error
            return [sequence.result() for sequence in sequences]
        raise AssertionError("unreachable")

    def _admit(self, request: GenerationRequest, stack: contextlib.ExitStack) -> ServedSequence:
        prompt, name = request.prompt_ids, f"request {request.request_id!r}"
        limit, vocab_size, seed = self._model.max_model_len, self._vocab_size, request.sampling.seed
        if self._awake is not _Awake.ALL:
            raise RuntimeError(f"{name} came while the server is {self._awake.value}; call wake() first")
        if request.request_id in self._sequences:
            raise ValueError(f"{name} is in flight already")
        if not prompt:
            raise ValueError(f"{name} has an empty prompt; expected at least one token")
        if limit is not None and len(prompt) >= limit:
            raise ValueError(
                f"{name} has a prompt of {len(prompt)} tokens, which leaves no room for a continuation within "
                f"max_model_len={limit}"
            )
        wrong = next((token for token in prompt if token < 0 or (vocab_size is not None and token >= vocab_size)), None)
        if wrong is not None:
            raise ValueError(f"{name} has the token {wrong} in its prompt; the vocabulary has {vocab_size}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"{name} has the seed {seed}; expected one from 0 to 2**64 - 1")
        sequence = self._sequences[request.request_id] = ServedSequence(request, limit)
        stack.callback(self._sequences.pop, request.request_id)
        return sequence

    async def _to_its_end(self, sequence: ServedSequence) -> None:
        while sequence.stop_reason is None:
            await self._run_part([sequence])

    async def _run_part(self, sequences: Sequence[ServedSequence]) -> None:
        """Have the server go on with sequences, until it or an update has ended that."""

        def have_ended() -> bool:
            return all(sequence.stop_reason is not None for sequence in sequences)

        async with self._changed:
            await self._changed.wait_for(lambda: self._serves or self._has_ended() or have_ended())
        if have_ended():
            return
        part = Part(sequences, self._version, next(self._numbers))
        self._parts.add(part)
        part.reading = asyncio.ensure_future(self._read(part))
        try:
            await asyncio.wait([part.reading])
            if part.reading.cancelled():
                await self._forget(part)
            else:
                part.reading.result()
        finally:
            part.close()
            self._parts.discard(part)
            await self._notify()
        for sequence in sequences:
            sequence.settle()

    async def _read(self, part: Part) -> None:
        client, first = self._running(), part.sequences[0]
        call = self._dialect.generation(
            model=self._model.id,
            request_id=part.request_id,
            token_ids=first.token_ids,
            sampling=first.request.sampling,
            max_new_tokens=first.num_left,
            seed=first.seed,
            num_samples=len(part.sequences),
        )
        counts = [0] * len(part.sequences)
        async with contextlib.aclosing(client.events(call.route, call.body)) as events:
            async for event in events:
                try:
                    chunks = self._dialect.chunks(event, counts)
                except ValueError as error:
                    await client.refuse(call.route, 200, str(error), "tokens with their log-probabilities")
                for chunk in chunks:
                    self._take(part, chunk)
                    counts[chunk.sample] += len(chunk.token_ids)
        if len(part.has_ended) < len(part.sequences):
            await client.refuse(call.route, 200, "the events ended before the sequences", "a reason for the end of each")

    def _take(self, part: Part, chunk: Chunk) -> None:
        sequence = part.sequences[chunk.sample]
        sequence.add(chunk.token_ids, chunk.logprobs, part.version)
        self._num_generated_tokens += len(chunk.token_ids)
        if chunk.stop_reason is None:
            return
        part.has_ended.add(chunk.sample)
        if chunk.stop_reason != "abort":
            sequence.end(chunk.stop_reason)
        elif not self._is_updating:
            sequence.settle()
            sequence.end("abort")  # by the server, for reasons of its own: the caller may go on from here

    async def _forget(self, part: Part) -> None:
        """Tell the server that nobody reads a part any more, where the end of the connection does not."""
        if (call := self._dialect.abort(part.request_id)) is not None and self._client is not None:
            with contextlib.suppress(ServerError, ServerLostError, TimeoutError):  # what was read of it counts all the same
                await self._tell([call])

    @property
    def _serves(self) -> bool:
        return not self._is_updating and not self._needs_weights and self._awake is _Awake.ALL

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

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
            RuntimeError: It ended half-way (TornWeightsError): nothing is generated until an update is completed, and abort
                gives requests back.
            ConnectionError: The other members of the group for weights are gone or late, or the server is lost.
            OSError: The files cannot be read, or there is no room for them.
        """
        self._running()
        async with self._one_update, self._laid_out(weights) as path, self._paused():
            self._needs_weights = True
            try:
                await self._tell(self._dialect.load(path))
            except ServerLostError:
                raise
            except Exception as error:
                raise TornWeightsError(
                    f"the server may have exchanged its weights in part: {type(error).__name__}: {error} Nothing is "
                    "generated by them until an update is completed."
                ) from error
            self._needs_weights, self._version = False, version
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
    async def _paused(self) -> AsyncIterator[None]:
        """While the server generates nothing; it goes on afterwards, unless it has no whole weights."""
        if self._awake is not _Awake.ALL:
            yield
            return
        self._is_updating = True
        try:
            await self._tell(self._dialect.pause())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S), self._changed:
                    await self._changed.wait_for(lambda: not self._parts)
            for part in list(self._parts):
                part.close()
            yield
        except BaseException:
            if not self._needs_weights:
                with contextlib.suppress(ServerError, ServerLostError, TimeoutError):  # the first error counts
                    await self._tell(self._dialect.resume())
            raise
        else:
            await self._tell(self._dialect.resume())
        finally:
            self._is_updating = False
            await self._notify()

    # --- sleep ------------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """See InferenceEngine; for a server that was started with ``ServerConfig.sleep``.

        Raises:
            ValueError: Another level than 1 or 2.
            RuntimeError: Requests are in flight, or the server was not started so that it can sleep.
        """
        self._running()
        if level not in (1, 2):
            raise ValueError(f"level is {level}; expected 1 (the weights wait on the host) or 2 (they are dropped)")
        if not self.config.sleep:
            raise RuntimeError("this server was not started so that it can sleep; set ServerConfig.sleep")
        async with self._one_update:
            if self._sequences:
                raise RuntimeError(
                    f"{len(self._sequences)} requests are in flight; let them end, or abort them, before sleep()"
                )
            if self._awake is _Awake.NOTHING:
                return
            self._awake = _Awake.NOTHING
            await self._tell(self._dialect.sleep(level))
            if level == 2:
                self._needs_weights = True

    async def wake(self, *, weights_only: bool = False) -> None:
        """See InferenceEngine."""
        self._running()
        async with self._one_update:
            needs_weights_memory = self._awake is _Awake.NOTHING
            needs_cache = self._awake is not _Awake.ALL and not weights_only
            await self._tell(self._dialect.wake(weights=needs_weights_memory, cache=needs_cache))
            if needs_cache:
                self._awake = _Awake.ALL
            elif needs_weights_memory:
                self._awake = _Awake.WEIGHTS
            await self._notify()


def _model_at(address: str, headers: Mapping[str, str], limit_s: float) -> _Model:
    route = "/v1/models"
    status, answer = get(address, route, headers, limit_s)
    if status != 200:
        raise ServerRequestError(
            address=address,
            route=route,
            status=status,
            answer=answer.decode(errors="replace"),
            expected="200 with its models",
            step="Look whether it is of ServerConfig.dialect, and whether another program listens there",
        )
    return msgspec.json.decode(answer, type=_Models).data[0]


def _gauge(metrics: str, name: str) -> float:
    """The value of a gauge in Prometheus' text, summed over its labels."""
    values = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(map(float, values))
