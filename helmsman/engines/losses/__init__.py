"""Losses as pure functions, as described by ``helmsman.api.engines.LossFn``.

docs/training.md lists them. A new one goes into ``policy`` or ``supervised``, into ``LOSSES``,
and into ``LOSS_NAMES`` of train_config. One of your own needs none of this: give its function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from helmsman.api.engines import (
    Head,
    LossFn,
    LossTraits,
    Sample,
    require_mapping,
    sample_numbers,
)
from helmsman.api.pairs import PAIR
from helmsman.api.suggestions import did_you_mean
from helmsman.engines.losses.columns import LossResult, kl_estimate
from helmsman.engines.losses.policy import cispo_loss, decoupled_ppo_loss, grpo_loss, gspo_loss
from helmsman.engines.losses.supervised import (
    distill_loss,
    dpo_loss,
    reward_model_loss,
    sft_loss,
    value_loss,
)

__all__ = [
    "LOSSES",
    "LossCall",
    "cispo_loss",
    "decoupled_ppo_loss",
    "distill_loss",
    "dpo_loss",
    "grpo_loss",
    "gspo_loss",
    "kl_estimate",
    "prepare_loss",
    "resolve_loss",
    "reward_model_loss",
    "sft_loss",
    "value_loss",
]

LOSSES: dict[str, Callable[..., LossResult]] = {
    "sft": sft_loss,
    "distill": distill_loss,
    "grpo": grpo_loss,
    "ppo": grpo_loss,
    "decoupled_ppo": decoupled_ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "value": value_loss,
    "dpo": dpo_loss,
    "reward_model": reward_model_loss,
}
"""Losses by the short name that train_batch takes. ``ppo`` is ``grpo``; they differ only in how the
advantages are computed.
"""


class LossCall(msgspec.Struct, frozen=True):
    """A loss with its arguments and its requirements for the engine."""

    function: LossFn
    kwargs: dict[str, Any]
    traits: LossTraits

    def __call__(self, outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> LossResult:
        """Compute the sums of the loss and of its statistics over a micro-batch.

        Args:
            outputs: (B, T) float32, log-probabilities or values under the current weights.
            batch: Columns of the micro-batch by name, (B, T) or (B,).

        Returns:
            The loss and the statistics, each a tensor of one element.

        Raises:
            ValueError: The function returns something else, or a sum without a gradient although
                tokens count.
        """
        result: Any = self.function(outputs, batch, **self.kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ValueError(
                f"loss {self.name!r} returned a {type(result).__name__}; expected (loss_sum, stats)"
            )
        loss_sum, stats = result
        for name, value in {"loss_sum": loss_sum, **stats}.items():
            is_tensor = isinstance(value, torch.Tensor)
            if not is_tensor or value.numel() != 1:
                found = tuple(value.shape) if is_tensor else f"a {type(value).__name__}"
                raise ValueError(
                    f"loss {self.name!r} returned {name} as {found}; expected a tensor of one "
                    "number, a sum over the batch"
                )
        if outputs.requires_grad and not loss_sum.requires_grad and bool(batch["loss_mask"].any()):
            raise ValueError(
                f"loss {self.name!r} returned a sum that has no gradient; compute it from the "
                "outputs that it is given, without item() and detach()"
            )
        return loss_sum, stats

    @property
    def name(self) -> str:
        """Name of the function."""
        name: str = getattr(self.function, "__name__", repr(self.function))
        return name

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads the column ``entropy``."""
        asked = self.traits.needs_entropy
        return bool(self.kwargs.get(asked)) if isinstance(asked, str) else asked


def prepare_loss(
    loss: LossFn | str, kwargs: Mapping[str, Any] | None, samples: Sequence[Sample], head: Head
) -> LossCall:
    """Resolve a loss and check that it suits these samples and this engine's head.

    Args:
        loss: A name in LOSSES, an import path, or a function.
        kwargs: Further arguments of the loss.
        samples: This rank's samples.
        head: Head of the engine's model.

    Returns:
        The loss, ready to be called with outputs and batch.

    Raises:
        ValueError: The loss does not exist, lacks an argument of ``kwargs``, reads the outputs of
            another head, or compares pairs and the samples are not mappings or not paired.
    """
    function, arguments = resolve_loss(loss), dict(kwargs or {})
    while isinstance(function, functools.partial) and not function.args:
        partial: functools.partial[Any] = function
        function, arguments = partial.func, {**partial.keywords, **arguments}
    traits = getattr(function, "traits", LossTraits())
    call = LossCall(function=function, kwargs=arguments, traits=traits)
    name = loss if isinstance(loss, str) else getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters
    for argument in arguments:
        if argument not in parameters and all(
            each.kind is not each.VAR_KEYWORD for each in parameters.values()
        ):
            raise ValueError(
                f"loss {name!r} has no setting {argument!r}; "
                f"{did_you_mean(argument, list(parameters)[2:])}"
            )
    if traits.head not in (None, head):
        raise ValueError(
            f"loss {name!r} is for a model with the head {traits.head!r}; this engine's "
            f"TrainConfig.head is {head!r}"
        )
    if call.needs_entropy and head != "lm":
        raise ValueError(
            f"loss {name!r} needs entropies, which a model with the head {head!r} does not have"
        )
    if traits.paired and samples:
        require_mapping(sample_numbers(samples)[0], samples[0])
    if traits.paired and samples and PAIR not in samples[0]:
        raise ValueError(
            f"loss {name!r} compares pairs and needs the column {PAIR!r} in every sample, which "
            "helmsman.api.pairs.pair_samples gives; the samples have "
            f"{', '.join(sorted(samples[0]))}"
        )
    return call


def resolve_loss(loss: LossFn | str) -> LossFn:
    """Return a loss, given itself, its short name or its import path ``package.module.function``.

    Raises:
        ValueError: The loss does not exist or is not callable.
    """
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    found: LossFn | str = loss
    if isinstance(loss, str):
        module, _, name = loss.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as exc:
            raise ValueError(
                f"there is no loss {loss!r}; give {', '.join(LOSSES)}, 'package.module.function' "
                "or a function"
            ) from exc
    if not callable(found):
        raise ValueError(f"the loss {loss!r} is a {type(found).__name__}; expected a function")
    return found
