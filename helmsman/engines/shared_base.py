"""Several policies on one base model: each has its own adapter, weight version and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weight_states import WeightState
from helmsman.api.weights import Weights
from helmsman.api.workers import worker_context
from helmsman.engines._serving.adapters import TrainedAdapters
from helmsman.engines._serving.generation import check_samples_of_one


def another_policy(base: str = "") -> InferenceEngine:
    """Make the engine of another policy on the base model of an engine in the same worker.

    It is the ``engine`` of a RolloutController whose job reuses the workers of a rollout role:
    ``SchedulingStrategy(type="colocation", target=role)``. The policy begins as version 0 without
    an adapter. Its trainer and that of the other policy send adapters alone,
    ``WeightFormat(adapters=True)``, and neither policy can sleep.

    Args:
        base: Name of the other engine, the ``engine_name`` of its controller; '' if it has none.

    Returns:
        The engine, which generates already.

    Raises:
        EngineDeadError: The worker has no such engine, or it is not running (yet).
        ValueError: The base model cannot be shared.
    """
    context = worker_context()
    name = base or (context.worker_id if context is not None else "")
    engines = context.engines if context is not None else {}
    if name not in engines:
        raise EngineDeadError(
            engine="another_policy",
            reason=f"its worker has no engine {name!r}, only {', '.join(engines) or 'none'}. Start "
            "the controller of the role whose workers it uses first, and give another_policy that "
            "controller's engine_name as base",
        )
    made: InferenceEngine = engines[name].beside()
    return made


def shares_base() -> ValueError:
    """Build the error for a whole model that arrived where policies share the base model."""
    return ValueError(
        "a whole model arrived, but another policy shares the base model of this instance, which "
        "is unchanged; send adapters alone, WeightFormat(adapters=True)"
    )


def require_shareable(state: WeightState, *, is_as_built: bool) -> None:
    """Raise ValueError unless a base model is awake and has the weights that it was built with."""
    if not state.is_serving or not is_as_built:
        raise ValueError(
            "another policy shares a base model as its folder has it, but this instance "
            + (f"is {state.value}" if is_as_built else "has random weights, or a whole model")
            + "; start the policy before anything but adapters is sent (WeightFormat(adapters="
            "True)), while the instance is awake"
        )


def require_slots(max_lora_rank: int, max_loras: int, num_policies: int) -> None:
    """Raise ValueError unless a server has room for an adapter of each policy."""
    if not max_lora_rank or max_loras < num_policies:
        raise ValueError(
            f"max_lora_rank is {max_lora_rank} and max_loras is {max_loras}; expected a rank, and "
            f"{num_policies} adapters or more for {num_policies} policies on one base model: "
            "the sum of their max_staleness + 1"
        )


class PolicyServer(Protocol):
    """An engine that serves policies by adapters of their own."""

    def failure(self) -> str | None:
        """Return why it cannot serve."""

    async def generate_with(
        self, policy: TrainedAdapters, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt."""

    async def abort_of(self, policy: TrainedAdapters, request_ids: Sequence[str] | None) -> int:
        """End requests of a policy."""

    async def update_of(self, policy: TrainedAdapters, weights: Weights, version: int) -> int:
        """Update the adapter of a policy."""

    def leave(self, policy: TrainedAdapters) -> None:
        """End a policy with its requests."""


class PolicyBeside(InferenceEngine):
    """A further policy of a PolicyServer, which generates until one of the two is destroyed."""

    def __init__(self, server: PolicyServer, policy: TrainedAdapters) -> None:
        self._server, self._policy = server, policy

    def initialize(self) -> None:
        """Do nothing: it generates already."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt."""
        return (await self._server.generate_with(self._policy, [request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times."""
        check_samples_of_one(requests)
        return await self._server.generate_with(self._policy, requests)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End the given requests (None: all) with stop_reason 'abort'; return their number."""
        return await self._server.abort_of(self._policy, request_ids)

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Load an adapter and serve it as ``version``; requests in flight keep theirs."""
        return await self._server.update_of(self._policy, weights, version)

    def get_version(self) -> int:
        """Return the weight version that is served."""
        return self._policy.requests.version

    def stats(self) -> dict[str, Any]:
        """Return ``num_generated_tokens`` of this policy, and its weight ``version``."""
        requests = self._policy.requests
        return {
            "num_generated_tokens": requests.num_generated_tokens,
            "version": requests.version,
        }

    def failure(self) -> str | None:
        """Return why the server can no longer serve, or None while it can."""
        return self._server.failure()

    def destroy(self) -> None:
        """End all requests of this policy. Idempotent."""
        self._server.leave(self._policy)
