"""Protocol between ServerEngine and an inference server: configuration, requests and answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from helmsman.api.suggestions import Suggesting
from helmsman.engines._serving.requests import Attempt

_OURS = {
    "--model": "set ServerConfig.model",
    "--model-path": "set ServerConfig.model",
    "--host": "set ServerConfig.host",
    "--port": "the engine uses the port leased to its worker; leave it out",
    "--max-lora-rank": "set ServerConfig.max_lora_rank",
    "--max-loras": "set ServerConfig.max_loras",
    "--api-key": "each engine generates its own; leave it out",
}
"""Arguments that ServerConfig.args must not have -> the alternative."""


class ServerConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Configuration of an inference server that serves a rollout instance."""

    model: str
    """Local folder in the Hugging Face layout."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """Kind of server."""
    tensor_parallel_size: int = 1
    """Devices that the model is split over, out of the worker's."""
    max_model_len: int | None = None
    """Maximum tokens of a sequence, prompt and continuation; None uses the model's limit."""
    dtype: str = "auto"
    """Type of weights and cache, by the server's name for it."""
    seed: int = 0
    """Seed for requests that have none."""
    sleep: bool = False
    """Start the server with support for sleep."""
    max_lora_rank: int = 0
    """Largest rank of the adapters that a trainer sends; 0 for none. vLLM knows 1, 8, 16, 32, 64,
    128, 256, 320 and 512.
    """
    max_loras: int = 1
    """Adapters in one batch: versions that requests in flight use at once."""
    args: tuple[str, ...] = ()
    """Further arguments of the server. They come last, so they override ours; model, address,
    key and limits of adapters are not allowed.
    """
    env: dict[str, str] = {}
    """Environment variables of the server, in addition to the worker's."""
    command: tuple[str, ...] = ()
    """Program and its first arguments, before ours, such as ('vllm', 'serve'). Empty: the server's
    Python module, run by the worker's Python.
    """
    host: str = "127.0.0.1"
    """Address on which the server listens; 'node' is the address of the worker's node. Only its own
    worker needs to reach it, and vLLM's key does not protect the routes that change weights.
    """
    start_timeout_s: float = 600.0
    """Seconds until the server must be ready."""
    stop_timeout_s: float = 15.0
    """Seconds for an orderly stop."""
    control_timeout_s: float = 600.0
    """Seconds for one control request, such as loading weights."""
    retry_s: float = 30.0
    """Seconds during which a request that cannot have started is retried: the connection was
    refused, or the server answered 503.
    """
    exchange_folder: str = "/dev/shm"
    """Folder for weights that do not arrive as files; it needs room for all of them."""

    def __post_init__(self) -> None:
        for name in (arg.partition("=")[0].replace("_", "-") for arg in self.args):
            if name in _OURS:
                raise ValueError(f"args has {name}, which ServerEngine sets itself: {_OURS[name]}")
        for name, least in {"tensor_parallel_size": 1, "max_lora_rank": 0, "max_loras": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        for name in ("start_timeout_s", "stop_timeout_s", "control_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")


class HttpRequest(NamedTuple):
    """One HTTP request to a server: route, JSON body and query parameters."""

    route: str
    body: Any = None
    params: Mapping[str, str] | None = None
    busy_status: int = 503
    """Answer of a server that is busy; the request is then sent again for ``retry_s`` seconds."""


class Chunk(NamedTuple):
    """Tokens that one event of a generation adds to one sample."""

    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: Literal["stop", "length", "abort"] | None


class Stats(NamedTuple):
    """Names of a server's metrics."""

    num_running: str
    num_waiting: str
    kv_cache_usage: str

    def values_in(self, metrics: str) -> dict[str, float]:
        """Return the values in the text of a server's metrics, by the names of these fields."""
        return {ours: _gauge(metrics, theirs) for ours, theirs in self._asdict().items()}


def _gauge(metrics: str, name: str) -> float:
    values = [
        line.rsplit(" ", 1)[1]
        for line in metrics.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(map(float, values))


class ServerDialect(Protocol):
    """Command, requests and answers of one kind of server. Stateless."""

    health_route: str
    """Route that answers 200 once the server is ready."""
    samples_together: bool
    """Whether one request can have several samples."""
    stats: Stats

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        """Return the program and its arguments."""

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        """Return the environment variables that the server needs."""

    def generation(self, model: str, attempt: Attempt) -> HttpRequest:
        """Return the request for an attempt; a stream of events answers it."""

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        """Decode an event.

        Args:
            event: Data of the event, JSON.
            num_tokens: Number of tokens received before, for each sample.

        Returns:
            The new tokens by sample.

        Raises:
            ValueError: The event is an error or not of this dialect (msgspec.DecodeError too).
        """

    def abort(self, request_id: str) -> HttpRequest | None:
        """Return the request that ends a generation; None if closing the connection ends it."""

    def pause(self) -> list[HttpRequest]:
        """Return requests that abort all generations and start none until resume."""

    def resume(self) -> list[HttpRequest]:
        """Return requests that let the server generate again."""

    def load(self, path: str) -> list[HttpRequest]:
        """Return requests that load the weights of a folder and empty the prefix cache."""

    def load_adapter(self, name: str, path: str) -> HttpRequest:
        """Return the request that loads an adapter from a folder in the form of PEFT."""

    def unload_adapter(self, name: str) -> HttpRequest:
        """Return the request that unloads an adapter, which no generation uses."""

    def sleep(self, level: int) -> list[HttpRequest]:
        """Return requests that release memory; levels as in InferenceEngine.sleep."""

    def wake(self, *, weights: bool, cache: bool) -> list[HttpRequest]:
        """Return requests that allocate the memory of the weights, of the cache, or of both."""


def require_logprobs(token_ids: Sequence[int], logprobs: Sequence[float | None]) -> list[float]:
    """Check that each token has a finite log-probability; raise ValueError otherwise."""
    found = [math.nan if each is None else each for each in logprobs]
    if len(token_ids) != len(found) or any(math.isnan(each) for each in found):
        raise ValueError(
            f"{len(token_ids)} tokens came with the log-probabilities {list(logprobs)}; expected "
            "one per token, none missing or NaN"
        )
    return found


class _Outcome(msgspec.Struct, frozen=True):
    success: bool = True
    results: list[Any] = []


def problem_in(answer: bytes) -> str | None:
    """Return the error in an answer, if any.

    Errors are ``{"success": false}``, and failures that a method of VLLMWorkerExtension returned on
    any rank.
    """
    try:
        outcome = msgspec.json.decode(answer, type=_Outcome)
    except msgspec.DecodeError:
        return None  # The answer is plain text.
    problems = [
        ": ".join(each["error"])
        for each in outcome.results
        if isinstance(each, dict) and "error" in each
    ]
    if problems:
        return "; ".join(dict.fromkeys(problems))
    return None if outcome.success else answer.decode(errors="replace")
