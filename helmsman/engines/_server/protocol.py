"""The protocol that ServerEngine speaks with an inference server: its configuration, requests and
answers.
"""

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
    "--port": "it is a port that is leased to the worker; leave it out",
    "--api-key": "each engine makes its own; leave it out",
}
"""Arguments that ServerConfig.args may not have, and what to do."""


class ServerConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Which server a rollout instance runs, and how."""

    model: str
    """Local folder in the Hugging Face layout."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """Which server it is."""
    tensor_parallel_size: int = 1
    """Devices that the model is split over, of those that the worker was given."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and continuation; None leaves it to the model."""
    dtype: str = "auto"
    """Type of weights and cache, as the server calls it."""
    seed: int = 0
    """Of what has no seed of its own."""
    sleep: bool = False
    """Start the server so that it can sleep."""
    args: tuple[str, ...] = ()
    """More of the server's own arguments, which come last, so that they win over ours. Not its
    model, address and key.
    """
    env: dict[str, str] = {}
    """Environment variables of the server, beside the worker's."""
    command: tuple[str, ...] = ()
    """The program with its first arguments, before ours, such as ('vllm', 'serve'); empty for its
    module, by the worker's Python."""
    host: str = "127.0.0.1"
    """Where the server listens; 'node' is the address of the worker's node. Only its own worker
    needs to reach it, and vLLM's key does not cover the routes by which weights are changed."""
    start_timeout_s: float = 600.0
    """How long it may take to get ready."""
    stop_timeout_s: float = 15.0
    """How long it has to end in order."""
    control_timeout_s: float = 600.0
    """How long a control request may take, such as the loading of weights."""
    retry_s: float = 30.0
    """How long a request that cannot have begun is sent again: the connection was refused, or the
    server answered 503.
    """
    exchange_folder: str = "/dev/shm"
    """Where weights that do not come as files are laid for the server to read; it needs room for
    all of them.
    """

    def __post_init__(self) -> None:
        for name in (arg.partition("=")[0].replace("_", "-") for arg in self.args):
            if name in _OURS:
                raise ValueError(
                    f"args has {name}, which ServerEngine gives the server itself: {_OURS[name]}"
                )
        if self.tensor_parallel_size < 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; expected 1 or more"
            )
        for name in ("start_timeout_s", "stop_timeout_s", "control_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")


class Call(NamedTuple):
    route: str
    body: Any = None
    params: Mapping[str, str] | None = None


class Chunk(NamedTuple):
    """What one event of a generation brings for one sample."""

    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: Literal["stop", "length", "abort"] | None


class Stats(NamedTuple):
    num_running: str
    num_waiting: str
    kv_cache_usage: str


class Dialect(Protocol):
    """How one kind of server is started and spoken to. It keeps no state."""

    health_route: str
    """Answers 200 once the server is ready."""
    samples_together: bool
    """Whether one request can have several samples."""
    stats: Stats

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        """Program and arguments."""

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        """Variables that it needs."""

    def generation(self, model: str, attempt: Attempt) -> Call:
        """The request for an attempt, which is answered by a stream of events."""

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        """What an event says. ``num_tokens``: of each sample, how many this answer has brought
        before.

        Raises: ValueError (msgspec.DecodeError too) with what it says for one that is an error, or
            not of this dialect.
        """

    def abort(self, request_id: str) -> Call | None:
        """End a generation; None where the end of the connection does."""

    def pause(self) -> list[Call]:
        """End all generations as aborted, and begin none until resume."""

    def resume(self) -> list[Call]:
        """Generate again."""

    def load(self, path: str) -> list[Call]:
        """Take the weights of a folder, and forget what was computed by the old ones."""

    def sleep(self, level: int) -> list[Call]:
        """See InferenceEngine.sleep."""

    def wake(self, *, weights: bool, cache: bool) -> list[Call]:
        """Take back the memory of the weights, of the cache, or of both."""


def require_logprobs(token_ids: Sequence[int], logprobs: Sequence[float | None]) -> list[float]:
    found = [math.nan if each is None else each for each in logprobs]
    if len(token_ids) != len(found) or any(math.isnan(each) for each in found):
        raise ValueError(
            f"it has {len(token_ids)} tokens with the log-probabilities {list(logprobs)}"
        )
    return found


class _Outcome(msgspec.Struct, frozen=True):
    success: bool = True
    results: list[Any] = []


def problem_in(answer: bytes) -> str | None:
    """Of ``{"success": false}``, and of what a method of VLLMWorkerExtension returned on any
    rank.
    """
    try:
        outcome = msgspec.json.decode(answer, type=_Outcome)
    except msgspec.DecodeError:
        return None  # it is text for people
    problems = [
        ": ".join(each["error"])
        for each in outcome.results
        if isinstance(each, dict) and "error" in each
    ]
    if problems:
        return "; ".join(dict.fromkeys(problems))
    return None if outcome.success else answer.decode(errors="replace")
