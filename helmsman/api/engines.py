"""Contracts of the two kinds of engines that the controllers drive: training and inference.

An engine is any object in a worker. Methods defined with ``def`` run one after another on the
worker's engine thread; methods defined with ``async def`` run concurrently on its event loop. A
Scheduler calls any object; TrainController and RolloutController require these base classes.
"""

from __future__ import annotations

import abc
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    MemoryTarget,
    WeightFormat,
    Weights,
    WeightsInMemory,
    WeightsOnDisk,
    WeightTarget,
)

if TYPE_CHECKING:
    import torch

Sample: TypeAlias = Mapping[str, Any]
"""One training sequence. ``input_ids`` (T,) int, a list, numpy array or tensor, is required; every
other entry is per token (T,) or a scalar. Per-token entries are aligned with ``input_ids``: entry t
belongs to token t. ``loss_mask[t]`` states whether the prediction *of* token t counts, and
``logprobs[t]`` is the log-probability of token t given the tokens before it (entry 0 is unused). A
scalar ``pair`` keeps two samples together, see helmsman.api.pairs. ``top_ids`` and ``top_logprobs``
(T, k) are a teacher's choices in place of token t, as ``forward_top`` returns them.
"""

TOP_IDS, TOP_LOGPROBS = PER_CHOICE = ("top_ids", "top_logprobs")
"""Columns (T, k) of the k most probable tokens of a teacher: ids, and log-probabilities."""
OWN_TOP_LOGPROBS = "own_top_logprobs"
"""Column (B, T, k) that a train engine adds for a loss: log-probabilities of ``top_ids`` under the
current weights, float32 and differentiable.
"""


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
    """Return the index of each sample in the caller's batch, which a SampleShare holds.

    In other sequences it is the position in ``samples``.
    """
    return samples.numbers if isinstance(samples, SampleShare) else range(len(samples))


def require_mapping(number: int, sample: object) -> None:
    """Raise ValueError if a sample of a batch is not a mapping.

    Args:
        number: Index of the sample in the caller's batch.
        sample: The sample.
    """
    if not isinstance(sample, Mapping):
        raise ValueError(
            f"sample {number} is {reprlib.repr(sample)} (type {type(sample).__name__}); expected a "
            "mapping of columns by name, with 'input_ids'"
        )


LossFn: TypeAlias = Callable[..., tuple["torch.Tensor", dict[str, "torch.Tensor"]]]
"""``loss_fn(outputs, batch, **kwargs) -> (loss_sum, stats)``, a pure function.

``outputs`` (B, T) float32 is the model's output for each token under the current weights: its
log-probability given the tokens before it (entry 0 of each row is 0). With a value head it is the
value of the tokens up to and *including* this one. ``batch`` holds the padded columns of the
samples, each (B, T) or (B,), and ``loss_mask`` (B, T) bool. Entries outside of the mask may have
any value, including NaN, and must not affect the loss or its gradient.

``loss_sum`` is the *sum* over the masked tokens. The engine divides it by the number of masked
tokens in the global batch, over all micro-batches and data-parallel ranks; results therefore do not
depend on how the batch was split. ``stats`` are sums, averaged the same way. ``loss_traits``
declares further requirements of a loss.
"""

Head: TypeAlias = Literal["lm", "value"]
"""The output layer of a model: ``lm`` predicts the next token; ``value`` returns a number per token
(critic, reward model).
"""


_Loss = TypeVar("_Loss", bound="LossFn")


class LossTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a loss. As a decorator it sets the function's attribute ``traits``."""

    head: Head | None = None
    """The head whose outputs the loss reads; a train engine with the other head rejects the loss.
    None: not checked.
    """
    paired: bool = False
    """Rows 2j and 2j + 1 of ``batch`` are the two samples of one pair, the preferred one first (see
    helmsman.api.pairs). Sums are divided by the pairs of the global batch instead of its tokens.
    """
    needs_entropy: bool | str = False
    """Adds ``entropy`` (B, T) float32, differentiable, to ``batch``: entry t is the entropy in nats
    of the distribution that token t was drawn from, at temperature 1. A string: only if the
    argument of this name is given and not 0, since it costs a second pass over the logits.
    """

    def __call__(self, loss: _Loss) -> _Loss:
        """Set the ``traits`` of a loss."""
        loss.traits = self  # type: ignore[attr-defined]
        return loss


loss_traits = LossTraits
"""``@loss_traits(head="value")`` above a loss declares its requirements."""


class TrainEngine(abc.ABC):
    """A rank of a training job. Every method is called on all ranks of the job."""

    @abc.abstractmethod
    def create_process_group(self) -> None:
        """Join the job's process group.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment.
        """

    @abc.abstractmethod
    def initialize(self) -> None:
        """Build the model and optimizer on this rank."""

    @abc.abstractmethod
    def train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step over this rank's share of a batch.

        Args:
            samples: This rank's samples.
            loss_fn: A function, its import path, or the name of a built-in loss.
            loss_kwargs: Named arguments of the loss.

        Returns:
            Global statistics, the same on every rank.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Compute the loss without gradients and without an optimizer step.

        Args:
            samples: This rank's samples.
            loss_fn: A function, its import path, or the name of a built-in loss.
            loss_kwargs: Named arguments of the loss.

        Returns:
            Global statistics, the same on every rank.
        """

    @abc.abstractmethod
    def forward(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Compute the log-probabilities of each sample's tokens.

        Returns:
            Tensors (T,) float32 on the host, in the order of the samples; entry 0 is 0. With a
            value head: values, where entry t covers the tokens up to and including t.
        """

    @abc.abstractmethod
    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Gather the full (unsharded) parameters by Hugging Face name, on the host.

        A collective; ranks other than 0 return None.
        """

    def publish_weights(
        self, target: WeightTarget, form: WeightFormat
    ) -> WeightsInMemory | WeightsOnDisk | int | None:
        """Send the full parameters by Hugging Face name to a target.

        A collective. ``helmsman.engines.weight_transfer.publish`` implements it for tensors sharded
        by DTensor. By default, the result of export_weights goes to a MemoryTarget, in the default
        WeightFormat alone.

        Args:
            target: The destination, with the expected weight version.
            form: Data type, names and buckets of the parameters.

        Returns:
            The target's result on rank 0; see WeightTarget.

        Raises:
            ValueError: The weights do not have the target's version (any more).
        """
        if not isinstance(target, MemoryTarget) or form != WeightFormat():
            raise NotImplementedError(
                f"{type(self).__name__} has no publish_weights; it sends weights only by "
                "ViaMemory, in the default WeightFormat"
            )
        if (version := self.get_version()) != target.version:
            raise ValueError(
                f"the trainer has weight version {version}, but version {target.version} was to be "
                "sent. Take no step until a push has returned; then push again"
            )
        exported = self.export_weights()
        return None if exported is None else WeightsInMemory(exported)

    def open_weight_store(self, address: str) -> int:
        """Open a weight-transfer store at this address on rank 0; returns its port."""
        raise NotImplementedError(
            f"{type(self).__name__} has no open_weight_store; use another transport than "
            "ViaCollective"
        )

    def open_weight_socket(self) -> str:
        """Listen for processes on this rank's device; returns the address, for a DeviceTarget."""
        raise NotImplementedError(
            f"{type(self).__name__} has no open_weight_socket; use another transport than ViaDevice"
        )

    async def leave_out_receiver(self, target: CollectiveTarget | DeviceTarget) -> None:  # noqa: B027 - engines may do without
        """Stop waiting in publish_weights for a receiver that no longer takes part.

        By default, the engine waits until its limit.

        Args:
            target: The receiver's target.
        """

    @abc.abstractmethod
    def save(self, path: str) -> None:
        """Write the full training state below ``path``, atomically."""

    def save_in_background(self, path: str) -> None:
        """Return once training no longer changes the state to save, and write it in the background.

        The next save and ``destroy`` wait for the write. If it fails, nothing remains at ``path``,
        and a later engine call raises the error, once; each engine documents which calls do.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_in_background; use save")

    def wait_for_save(self) -> None:
        """Wait until save_in_background has finished; raises its error."""
        raise NotImplementedError(f"{type(self).__name__} has no save_in_background; use save")

    @abc.abstractmethod
    def load(self, path: str) -> None:
        """Read the state that ``save`` wrote."""

    def export_hf(
        self, path: str, dtype: str | None = None, max_shard_bytes: int = 5 << 30
    ) -> None:
        """Write the full parameters, configuration and tokenizer as a Hugging Face directory.

        Args:
            path: The directory; written completely or not at all.
            dtype: Floating-point type of the parameters; None keeps theirs.
            max_shard_bytes: Maximum size of a file.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no export_hf; export_weights returns its weights"
        )

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the weight version: the number of optimizer steps, unless set otherwise."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Set the weight version."""

    @abc.abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate, from the next step on."""

    async def abort_collectives(self, reason: str) -> None:
        """End the collectives that this rank waits in, while another of its methods runs.

        Called on all ranks when one has failed and others still wait for it. Later calls must
        fail, since the ranks no longer agree on their next collective. Without this method, such
        ranks wait until their own limits.

        Args:
            reason: For the errors of later calls.
        """
        return

    def sleep(self) -> None:
        """Move parameters and optimizer state to the host, to free the devices for another engine.

        Until ``wake``, only wake, get_version, export_weights, publish_weights and destroy are
        allowed; the exports send the copy on the host. On every rank; idempotent.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method sleep, so it cannot share devices with "
            "another engine in turns"
        )

    def wake(self) -> None:
        """Move the state back to the devices and continue. On every rank; idempotent."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method wake, so it cannot share devices with "
            "another engine in turns"
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
        """Number of data-parallel ranks, over which batches are split."""
        return 1

    @property
    def model_parallel_group(self) -> Any | None:
        """Process group of the ranks that share a data-parallel coordinate; None for one rank."""
        return None


class InferenceEngine(abc.ABC):
    """A rollout instance that generates continuations of prompts."""

    @abc.abstractmethod
    def initialize(self) -> None:
        """Build the model on this instance's devices."""

    @abc.abstractmethod
    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt. The engine batches the calls in flight.

        Only ``stop_token_ids`` end a sequence early; the model's own end token must be listed
        there.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the
                id is already in flight.
            RuntimeError: The engine is asleep, or is not running.
        """

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times, computing the prompt once.

        Optional; used with ``samples_by_engine`` of RolloutController. The requests differ only in
        id and seed; ``abort`` ends each by its own id.

        Returns:
            Results in the order of the requests, once all have ended.

        Raises:
            ValueError: The prompts differ, or a request is invalid for ``agenerate``.
            RuntimeError: The engine is asleep, or is not running.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no agenerate_samples; leave out RolloutController's "
            "samples_by_engine, and each sample "
            "is a request of its own"
        )

    @abc.abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all) early and return their number.

        Each request returns its tokens so far with stop_reason 'abort'. Unknown ids are skipped.
        """

    @abc.abstractmethod
    async def update_weights(self, weights: Weights, version: int) -> int:
        """Load new parameters between two decoding steps.

        ``helmsman.engines.weight_transfer.incoming`` reads every form of Weights as tensors by
        name. After a partial update the instance gets no requests until an update succeeds, and its
        current requests are withdrawn.

        Args:
            weights: All parameters by Hugging Face name, of any dtype and device, in memory or as a
                location.
            version: The version of the parameters.

        Returns:
            The version served.

        Raises:
            ValueError: Names or shapes do not fit the model, which is unchanged.
            RuntimeError: The engine is asleep; call wake(weights_only=True) first. Or the update
                ended half-way (PartialWeightUpdateError): the engine generates nothing until an
                update completes, and ``abort`` returns its requests.
            ConnectionError: Other members of the weight-sync group have left or are late.
            OSError: The files cannot be read, or there is no space for them.
        """

    async def sleep(self, level: int = 1) -> None:
        """Free the devices' memory for another engine; no request is accepted until ``wake``.

        Args:
            level: 1 drops the key-value cache and keeps the weights on the host. 2 also drops the
                weights: after ``wake``, the engine serves nothing until a weight update.

        Raises:
            ValueError: The level is not 1 or 2.
            RuntimeError: Requests are in flight.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method sleep, so it cannot share devices with "
            "another engine in turns"
        )

    async def wake(self, *, weights_only: bool = False) -> None:
        """Allocate the devices' memory again.

        Args:
            weights_only: Allocates only the weights, so that an update fits before the trainer
                sleeps; a second call without it allocates the cache.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method wake, so it cannot share devices with "
            "another engine in turns"
        )

    def beside(self) -> InferenceEngine:
        """Return the engine of another policy on this engine's base model, already running.

        Optional. The other policy has its own adapter, weight version and requests.

        Raises:
            EngineDeadError: This engine is not running.
            ValueError: The base model cannot be shared.
        """
        raise NotImplementedError(f"{type(self).__name__} serves one policy: it has no beside()")

    def failure(self) -> str | None:
        """Return why this engine cannot serve although its worker is alive; None if it can.

        The reason is that processes which the engine started have ended. The worker calls this for
        every ``health`` request, on the thread that answers it, so it must neither block nor
        compute. Engine calls raise EngineDeadError in that state. A rollout controller treats
        either as the death of the instance.
        """
        return None

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the weight version that is served."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release the instance's devices. Idempotent."""
