"""Several policies on one base model: each has its own adapter, weight version and requests."""

from __future__ import annotations

import copy
from typing import Any

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineDeadError
from helmsman.api.workers import WorkerContext, worker_context


def another_policy(base: str = "") -> InferenceEngine:
    """Make the engine of another policy on the base model of an engine in the same worker.

    It is the ``engine`` of a RolloutController whose job reuses the workers of a rollout role:
    ``SchedulingStrategy(type="colocation", target=role)``. The policy begins as version 0 without
    an adapter. All trainers send adapters alone, ``WeightFormat(adapters=True)``, and no policy can
    sleep.

    Args:
        base: Name of the other engine, the ``engine_name`` of its controller; '' if it has none.

    Returns:
        The engine, which generates already.

    Raises:
        EngineDeadError: The worker has no such engine, or it is not running (yet).
        ValueError: The base model cannot be shared.
    """
    context = worker_context() or WorkerContext(worker_id="", node="")
    name = base or context.worker_id
    try:
        made: InferenceEngine = context.engines[name].beside()
    except (KeyError, RuntimeError) as error:
        if type(error) not in (KeyError, RuntimeError):  # no such method, or no memory
            raise
        raise EngineDeadError(
            engine="another_policy",
            reason=f"no engine {name!r} runs in its worker, which has "
            f"{', '.join(context.engines) or 'none'}. Start the controller of the other role "
            "first, and give another_policy its engine_name as base",
        ) from error
    # Its controller calls it, but it runs already: an engine that cannot run is not created.
    made.initialize = lambda: None  # type: ignore[method-assign]
    return made


def shares_base(what: str) -> ValueError:
    """Build the error for a change of a base model that several policies share."""
    return ValueError(
        f"{what} would change the base model of this instance, which another policy shares; send "
        "adapters alone, WeightFormat(adapters=True), and let no policy sleep"
    )


class SharedBase:
    """The base model of an instance with its policies; the first one has built it."""

    def __init__(self, first: Any) -> None:
        self.policies = [first]
        self._is_as_built = True

    def require_alone(self, what: str) -> None:
        """Raise ValueError for a change if it is shared."""
        if len(self.policies) > 1:
            raise shares_base(what)

    def change(self) -> None:
        """Note that a whole model, or a sleep, has changed it."""
        self._is_as_built = False

    def require_as_built(self) -> None:
        """Raise ValueError if it has changed."""
        if not self._is_as_built:
            raise ValueError(
                "policies share a base model as it was built, and this one has slept or received a "
                "whole model; start all before, and send WeightFormat(adapters=True) alone"
            )

    def beside(self, first: Any, max_loras: int | None = None) -> Any:
        """Add a policy, a shallow copy of the first one.

        Raises:
            ValueError: The base model has changed, or a server's ``max_loras`` is too low.
        """
        self.require_as_built()
        if max_loras is not None and max_loras <= len(self.policies):
            raise ValueError(
                f"max_loras is {max_loras} for {len(self.policies) + 1} policies; expected the sum "
                "of their max_staleness + 2, and as max_lora_rank the largest of their ranks"
            )
        self.policies.append(copy.copy(first))
        return self.policies[-1]

    def leave(self, policy: Any) -> Any:
        """Remove a policy and return the first one; or return None for the first one itself."""
        if policy not in self.policies[1:]:
            return None
        self.policies.remove(policy)
        return self.policies[0]
