"""Forward and backward passes of a sharded model over the micro-batches of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from helmsman.api.engines import OWN_TOP_LOGPROBS, TOP_IDS
from helmsman.engines._models.distributed import failing_together, gather_objects
from helmsman.engines._train.attention import RowShape, gather_tokens
from helmsman.engines._train.batching import (
    Columns,
    MicroBatch,
    empty_micro_batch,
    fingerprint,
    group_samples,
    make_micro_batch,
)
from helmsman.engines._train.parallel import (
    ParallelMesh,
    begin_backward,
    cast_parameters,
    whole_pass,
)
from helmsman.engines._train.sharded_model import ModelTraits
from helmsman.engines.losses import LossCall
from helmsman.engines.train_config import TrainConfig


class ModelRunner:
    """Runs the passes of one rank. Its methods are collectives.

    ``model`` is a method of the engine that returns the sharded model. It is called before every
    pass, so that it can raise an error when the process groups have been aborted. It is referenced
    weakly, because the engine holds this runner and would be part of a cycle.
    """

    def __init__(
        self,
        config: TrainConfig,
        traits: ModelTraits,
        mesh: ParallelMesh,
        device: torch.device,
        model: Callable[[], nn.Module],
    ) -> None:
        self._config, self._traits, self._mesh = config, traits, mesh
        self._device, self._engines_model = device, weakref.WeakMethod(model)

    def _model(self) -> nn.Module:
        model = self._engines_model()
        assert model is not None
        return model()

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model has."""
        return self._traits.batching.vocab_size

    def accumulate(self, samples: Sequence[Columns], loss: LossCall) -> dict[str, float]:
        """Run the passes of a batch, and accumulate the gradients if they are enabled.

        Returns the statistics of the global batch, the same on every rank.

        Raises:
            ValueError: The global batch has no token in a loss mask.
            RuntimeError: Another rank failed. The loss's own error is raised on its rank.
        """
        micro_batches, num_tokens, num_samples = self._make_micro_batches(samples)
        if num_tokens == 0:
            raise ValueError("no token of the global batch counts: every loss_mask is empty")
        counts = {
            "num_tokens": num_tokens,
            **({"num_pairs": num_samples // 2} if loss.traits.paired else {}),
        }
        num_units = counts.get("num_pairs", num_tokens)
        with cast_parameters(self._model(), self._traits.compute_dtype):
            sums, error = self._passes(micro_batches, loss, num_units)
        with failing_together("the loss"):
            if error is not None:
                raise error
        totals: dict[str, float] = {}
        own = {name: float(value) for name, value in sums.items()}
        for rank_sums in gather_objects(own)[:: self._mesh.layout.model_size]:
            for name, value in rank_sums.items():
                totals[name] = totals.get(name, 0.0) + value
        averages = {name: value / num_units for name, value in totals.items()}
        return {**averages, **{name: float(count) for name, count in counts.items()}}

    def _passes(
        self, micro_batches: Sequence[MicroBatch], loss: LossCall, num_units: int
    ) -> tuple[dict[str, torch.Tensor], Exception | SystemExit | None]:
        """Return the sums of this rank's statistics, and the error of its loss, if any."""
        sums: dict[str, torch.Tensor] = {}
        error: Exception | SystemExit | None = None
        for number, on_host in enumerate(micro_batches, start=1):
            begin_backward(
                self._model(),
                is_last=number == len(micro_batches),
                reshard_after_backward=self._config.reshard_after_backward,
            )
            micro_batch = on_host.to(self._device)
            outputs = self._outputs(micro_batch, loss)
            # The backward pass is a collective, so a rank without a loss here takes part too.
            total = outputs.sum() * 0.0
            if micro_batch.indices and error is None:
                try:
                    loss_sum, stats = loss(outputs, micro_batch.columns)
                # Raised below, after this rank has taken part in the remaining collectives.
                except (Exception, SystemExit) as exc:  # noqa: BLE001
                    error = exc
                else:
                    total = total + loss_sum
                    for name, value in {"loss": loss_sum, **stats}.items():
                        sums[name] = (
                            sums.get(name, torch.zeros((), device=self._device)) + value.detach()
                        )
            if torch.is_grad_enabled():
                with whole_pass(self._model()):
                    # FSDP averages gradients over its ranks, but the loss is a sum over all ranks
                    # divided by the global number of tokens (pairs).
                    (total * (self._mesh.data.size() / num_units)).backward()
        return sums, error

    def forward(self, samples: Sequence[Columns]) -> list[torch.Tensor]:
        """Compute the log-probabilities or values of each sample's tokens: (T,) float32, on host.

        Raises ValueError if the ranks of a model-parallel group have different samples.
        """
        return [row for (row,) in self._rows_of(samples, lambda batch: (self._outputs(batch),))]

    def top_choices(
        self, samples: Sequence[Columns], num_choices: int, num_ids: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Find the most probable tokens in place of each sample's tokens.

        Returns ids (T, k) int32 and log-probabilities (T, k) float32, on the host. Raises
        ValueError if the ranks of a model-parallel group have different samples.
        """

        def choices(batch: MicroBatch) -> list[torch.Tensor]:
            found = self._of_targets(batch, batch.rows.next_ids, top=(num_choices, num_ids))
            whole = (self._whole_rows(each) for each in (found.ids.int(), found.logprobs))
            return [batch.rows.per_prediction(each) for each in whole]

        return self._rows_of(samples, choices)

    def _rows_of(
        self,
        samples: Sequence[Columns],
        compute: Callable[[MicroBatch], Sequence[torch.Tensor]],
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return each sample's part of the columns (B, T, ...) that ``compute`` returns."""
        results: list[tuple[torch.Tensor, ...]] = [()] * len(samples)
        micro_batches = self._make_micro_batches(samples)[0]
        with cast_parameters(self._model(), self._traits.compute_dtype):
            for micro_batch in micro_batches:
                outputs = [each.cpu() for each in compute(micro_batch.to(self._device))]
                for index, length, *rows in zip(
                    micro_batch.indices, micro_batch.lengths, *outputs, strict=False
                ):
                    results[index] = tuple(row[:length].clone() for row in rows)
        self._model()  # outputs of aborted collectives would be arbitrary
        return results

    def _make_micro_batches(self, samples: Sequence[Columns]) -> tuple[list[MicroBatch], int, int]:
        """Split the samples into micro-batches, padded with empty ones to the largest rank's count.

        Returns the micro-batches and the global numbers of loss tokens and of samples. A
        collective.
        """
        batching, model_size = self._traits.batching, self._mesh.layout.model_size
        groups = group_samples(samples, batching)
        num_tokens = sum(int(sample["loss_mask"].sum()) for sample in samples)
        shares = gather_objects((len(groups), num_tokens, len(samples), fingerprint(samples)))
        mismatched = [
            rank for rank, share in enumerate(shares) if share != shares[rank - rank % model_size]
        ]
        if mismatched:
            raise ValueError(
                f"rank(s) {mismatched} got other samples than the head of their model-parallel "
                "group; pass the same samples to all ranks of one data-parallel coordinate"
            )
        most = max(share[0] for share in shares)
        groups = group_samples(samples, batching, at_least=most)
        micro_batches = [make_micro_batch(group, samples, batching) for group in groups]
        micro_batches += [empty_micro_batch(batching)] * (most - len(groups))
        heads = shares[::model_size]
        return micro_batches, sum(share[1] for share in heads), sum(share[2] for share in heads)

    def _outputs(self, micro_batch: MicroBatch, loss: LossCall | None = None) -> torch.Tensor:
        """Compute log-probabilities or values of a micro-batch's tokens, (B, T) float32.

        The log-probability of a token is conditioned on the tokens before it; the first entry of
        each row is 0. If the loss needs entropies, they are added to the micro-batch's columns; so
        are the log-probabilities of a teacher's choices, if there are any.
        """
        rows, columns = micro_batch.rows, micro_batch.columns
        if self._config.head == "value":
            return rows.per_token(self._whole_rows(self._run(micro_batch)))
        targets, has_choices = rows.next_ids, loss is not None and TOP_IDS in columns
        if has_choices:
            choices = rows.to_predictions(columns[TOP_IDS].long())
            targets = torch.cat([targets[..., None], choices], dim=-1)
        needs_entropy = loss is not None and loss.needs_entropy
        statistics = self._of_targets(micro_batch, targets, with_entropies=needs_entropy)
        if statistics.entropies is not None:
            columns["entropy"] = rows.per_prediction(self._whole_rows(statistics.entropies))
        logprobs = rows.per_prediction(self._whole_rows(statistics.logprobs))
        if has_choices:
            columns[OWN_TOP_LOGPROBS], logprobs = logprobs[..., 1:], logprobs[..., 0]
        return logprobs

    def _of_targets(self, micro_batch: MicroBatch, targets: torch.Tensor, **how: Any) -> Any:
        """Run a model that returns statistics; ``how`` are arguments of return_statistics."""
        group = None
        if self._traits.has_sharded_logits:
            assert self._mesh.tensor is not None
            group = self._mesh.tensor.get_group()
        how = {"with_entropies": False, **how}
        return self._run(micro_batch, targets=self._own_part(targets), group=group, **how)

    def _run(self, micro_batch: MicroBatch, **arguments: Any) -> Any:
        """Run the model on this rank's part of the rows."""
        rows, model = micro_batch.rows, self._model()
        if self._traits.uses_row_attention:
            arguments |= {
                "position_ids": self._own_part(rows.position_ids),
                "helmsman_rows": RowShape(rows.segments, self._mesh.context_group, self._device),
            }
        with whole_pass(model):
            return model(input_ids=self._own_part(rows.input_ids), use_cache=False, **arguments)

    def _own_part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the part of rows (R, N, ...) that is this rank's, of its context group."""
        return rows.chunk(self._mesh.layout.context_size, dim=1)[self._mesh.context_rank]

    def _whole_rows(self, parts: torch.Tensor) -> torch.Tensor:
        group = self._mesh.context_group
        return parts if group is None else gather_tokens(parts, group)
