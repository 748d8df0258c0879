"""What an engine is: any object in a worker; these are the two kinds that the controllers know.

A method defined with ``def`` runs on the worker's engine thread, one after another; one defined
with ``async def`` runs on the worker's event loop, many at once. An engine needs no base class to
be called through a Scheduler; it needs these to be driven by TrainController and RolloutController.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import WeightFormat, Weights, WeightsInMemory, WeightsOnDisk, WeightTarget

if TYPE_CHECKING:
    import torch

Sample: TypeAlias = Mapping[str, Any]
"""One training sequence. ``input_ids`` (T,) int, a list, numpy array or tensor, is required; every
other entry is per token (T,) or a scalar. Per-token entries are aligned with ``input_ids``: entry t
belongs to token t, so ``loss_mask[t]`` says whether the prediction *of* token t counts, and
``logprobs[t]`` is the log-probability of token t given those before it (entry 0 is unused). A
scalar ``pair`` keeps two samples together, see helmsman.api.pairs."""


class SampleShare(list[Sample]):
    """Samples of one rank with their indices in the caller's batch, which error messages use.

    Args:
        samples: The share.
        numbers: Index of each sample in the whole batch.
    """

    def __init__(self, samples: Iterable[Sample], numbers: Iterable[int]) -> None:
        super().__init__(samples)
        self.numbers = tuple(numbers)


def sample_numbers(samples: Sequence[Sample]) -> Sequence[int]:
    """Index of each sample in the caller's batch; its position in ``samples`` unless these are a
    SampleShare.
    """
    return samples.numbers if isinstance(samples, SampleShare) else range(len(samples))


LossFn: TypeAlias = Callable[..., tuple["torch.Tensor", dict[str, "torch.Tensor"]]]
"""``loss_fn(outputs, batch, **kwargs) -> (loss_sum, stats)``, a pure function.

``outputs`` (B, T) float32 is what the model says of each token under the current weights: its
log-probability given those before it (entry 0 of each row is 0), or from a value head the value of
the tokens up to it, *this one included*. ``batch`` holds the padded columns of the samples, each
(B, T) or (B,), and ``loss_mask`` (B, T) bool. What stands outside of the mask may be anything, NaN
included, and must not reach the loss or its gradient.

``loss_sum`` is the *sum* over the masked tokens; the engine divides by the number of masked tokens
in the global batch, over all micro-batches and data-parallel ranks, which is why results do not
depend on how the batch was split. ``stats`` are sums, averaged the same way. What else a loss asks
of the engine it says by ``loss_traits``."""

Head: TypeAlias = Literal["lm", "value"]
"""What stands on top of a model: ``lm`` predicts the next token; ``value`` gives a number per token
(critic, reward model).
"""


_Loss = TypeVar("_Loss", bound="LossFn")


class LossTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss asks of the engine that calls it. As a decorator it becomes the function's
    attribute ``traits``.
    """

    head: Head | None = None
    """The head whose outputs it reads; a train engine with the other one refuses it. None: not
    checked.
    """
    paired: bool = False
    """Rows 2j and 2j + 1 of ``batch`` are the two samples of one pair, the preferred one first (see
    helmsman.api.pairs), and sums are divided by the pairs of the global batch instead of its
    tokens."""
    needs_entropy: bool | str = False
    """``batch`` gets ``entropy`` (B, T) float32, differentiable: entry t is the entropy in nats of
    the distribution that token t was drawn from, at temperature 1. A string: only where the
    argument of this name is given and not 0, since it costs a second pass over the logits."""

    def __call__(self, loss: _Loss) -> _Loss:
        """Mark a loss."""
        loss.traits = self  # type: ignore[attr-defined]
        return loss


loss_traits = LossTraits
"""``@loss_traits(head="value")`` above a loss that asks something of the engine."""


class TrainEngine(abc.ABC):
    """A rank of a training job. Every method is called on all ranks of the job."""

    @abc.abstractmethod
    def create_process_group(self) -> None:
        """Join the job's process group from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
        MASTER_PORT of the environment.
        """

    @abc.abstractmethod
    def initialize(self) -> None:
        """Build model and optimizer on this rank."""

    @abc.abstractmethod
    def train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """One optimizer step over this rank's share of a batch; returns the same global statistics
        on every rank.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """As train_batch, without gradients and without a step."""

    @abc.abstractmethod
    def forward(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Log-probabilities of each sample's tokens, (T,) float32 on the host, in the order of the
        samples; entry 0 is 0.

        From a value head: values, of which entry t is that of the tokens up to t, this one
            included.
        """

    @abc.abstractmethod
    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """The full (unsharded) parameters by Hugging Face name, on the host. A collective; ranks
        other than 0 return None.
        """

    def publish_weights(
        self, target: WeightTarget, form: WeightFormat
    ) -> WeightsInMemory | WeightsOnDisk | int | None:
        """Send the full parameters by Hugging Face name to a target, in this form, and return on
        rank 0 what the target says. Raises where the weights have not the target's version, which
        the script was told a moment ago, any more.

        A collective. ``helmsman.engines.weight_transfer.publish`` does it for tensors that are
        sharded by DTensor; an engine without it has its weights brought by export_weights alone.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no publish_weights; its weights go by export_weights alone"
        )

    def open_weight_store(self, address: str) -> int:
        """Have rank 0 listen at this address of its own, for instances that take weights by
        broadcasts; returns the port.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no open_weight_store; its weights go by export_weights "
            "alone"
        )

    @abc.abstractmethod
    def save(self, path: str) -> None:
        """Write all that training goes on from below ``path``, all or nothing."""

    def save_in_background(self, path: str) -> None:
        """As save, and return once the state is where training does not change it; it is written
        while training goes on. The next save and destroy wait for it. What goes wrong is raised by
        the next call that the engine says, once, and leaves nothing at ``path``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_in_background; use save")

    def wait_for_save(self) -> None:
        """Wait until what save_in_background began is written. Raises: what it met."""
        raise NotImplementedError(f"{type(self).__name__} has no save_in_background; use save")

    @abc.abstractmethod
    def load(self, path: str) -> None:
        """Read what save wrote."""

    def export_hf(
        self, path: str, dtype: str | None = None, max_shard_bytes: int = 5 << 30
    ) -> None:
        """Write the full parameters, configuration and tokenizer as a Hugging Face folder, all or
        nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no export_hf; its weights go by export_weights alone"
        )

    @abc.abstractmethod
    def get_version(self) -> int:
        """The weight version: the number of optimizer steps that made these weights, unless set
        otherwise.
        """

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Set the weight version."""

    @abc.abstractmethod
    def set_lr(self, lr: float) -> None:
        """Use another learning rate from the next step on."""

    def sleep(self) -> None:
        """Give the devices' memory back for another engine's turn: parameters and optimizer state
        wait on the host. Only wake, get_version, export_weights, publish_weights and destroy are
        allowed then. On every rank; idempotent.

        export_weights and publish_weights of a sleeping engine send what waits on the host.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no sleep; it cannot take turns with another engine"
        )

    def wake(self) -> None:
        """Take the devices' memory again and go on as if nothing had been. On every rank;
        idempotent.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no wake; it cannot take turns with another engine"
        )

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release devices and leave the process group. Idempotent."""

    @property
    def data_parallel_rank(self) -> int:
        """This rank's coordinate along the data-parallel axis."""
        return 0

    @property
    def data_parallel_world_size(self) -> int:
        """Ranks along the data-parallel axis; batches are split over these."""
        return 1

    @property
    def model_parallel_group(self) -> Any | None:
        """Process group of the ranks that share one data-parallel coordinate; None when this rank
        is alone in it.
        """
        return None


class InferenceEngine(abc.ABC):
    """A rollout instance that continues prompts."""

    @abc.abstractmethod
    def initialize(self) -> None:
        """Build the model on this instance's devices."""

    @abc.abstractmethod
    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt; many calls are in flight at once and are batched by the engine.

        Only ``stop_token_ids`` end a sequence early: the model's own end token is not among them
            unless it is named.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the
                id is in flight already.
            RuntimeError: The engine is asleep, or does not run.
        """

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times: requests that are equal but for id and seed, whose
        prompt is computed once.

        Optional, for RolloutController's ``samples_by_engine``. Results are in the order of the
        requests, when all have ended; abort ends each by its own id. Raises as agenerate, and
        ValueError where the prompts are not the same.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no agenerate_samples; leave out RolloutController's "
            "samples_by_engine, and each sample "
            "is a request of its own"
        )

    @abc.abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all) early; each returns what it has with stop_reason 'abort'.
        Unknown ids are skipped. Returns how many were ended.
        """

    @abc.abstractmethod
    async def update_weights(self, weights: Weights, version: int) -> int:
        """Take new parameters between two decoding steps and serve them as ``version``; returns the
        version served.

        ``helmsman.engines.weight_transfer.incoming`` reads all that Weights may be, as tensors by
        name. When it fails half-way the instance gets no requests until an update succeeds, and is
        asked to give back those it has.

        Args:
            weights: All of them, by Hugging Face name, of any type and device, in memory or where
                to get them.
            version: Their version.

        Raises:
            ValueError: Names or shapes do not fit the model, which is left as it was.
            RuntimeError: The engine is asleep, and wake(weights_only=True) comes first. Or the
                update ended half-way (PartialWeightUpdateError): nothing is generated until one is
                completed, and abort gives requests back.
            ConnectionError: The other members of the group for weights are gone or late.
            OSError: The files cannot be read, or there is no room for them.
        """

    async def sleep(self, level: int = 1) -> None:
        """Give the devices' memory back for another engine's turn. Requests must have ended; none
        is accepted until wake.

        Args:
            level: 1 drops the cache of keys and values, and keeps the weights on the host; 2 drops
                the weights too: after wake the engine serves nothing until an update of its
                weights.

        Raises:
            ValueError: Another level.
            RuntimeError: Requests are in flight.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no sleep; it cannot take turns with another engine"
        )

    async def wake(self, *, weights_only: bool = False) -> None:
        """Take the devices' memory again.

        Args:
            weights_only: Only what weights need, so that an update finds room before the trainer
                sleeps; a second wake without it brings the cache.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no wake; it cannot take turns with another engine"
        )

    def failure(self) -> str | None:
        """Why this engine can serve no more, though its worker lives: what it runs in other
        processes has ended. None while it can.

        A worker asks with every answer to ``health``, on the thread that answers: it must neither
        wait nor compute. Calls raise EngineDeadError then. Either makes a rollout controller take
        the instance for dead.
        """
        return None

    @abc.abstractmethod
    def get_version(self) -> int:
        """The weight version that is served."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release the instance's devices. Idempotent."""
