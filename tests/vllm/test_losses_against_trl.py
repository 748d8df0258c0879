"""Test losses and their gradients against trl's own code, on the same logits.

trl's losses are methods of its trainers; the tests call them on an object with the attributes that
they read. trl normalises its losses, so ours are divided by the tokens (or pairs) of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.rewards as trl_rewards
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.reward_trainer as trl_reward
import trl.trainer.utils as trl_utils
from transformers.loss.loss_utils import ForCausalLMLoss

from helmsman.api.advantages import sequence_weights
from helmsman.api.reward_shaping import soft_overlong_punishment
from helmsman.engines._train.vocabulary import token_statistics
from helmsman.engines.losses import LOSSES

NUM_ROWS, NUM_PROMPT, NUM_COMPLETION, VOCAB = 4, 3, 7, 11
LENGTH = NUM_PROMPT + NUM_COMPLETION
LENGTHS = (7, 4, 1, 6)
"""Tokens of each completion, of which the longest has NUM_COMPLETION."""
MAX_TOKENS = 9


def gather(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    return tensor


ACCELERATOR = SimpleNamespace(
    num_processes=1,
    device=torch.device("cpu"),
    gather=gather,
    gather_for_metrics=gather,
    reduce=gather,
    sync_gradients=True,
)


def token_logprobs(logits: torch.Tensor, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return the log-probability of each token given those before it; 0 at the first."""
    return torch.nn.functional.pad(
        token_statistics(logits[:, :-1], input_ids[:, 1:], **kwargs).logprobs, (1, 0)
    )


def entropies_of(logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return the entropy of each row of logits."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    entropies = token_statistics(logits, targets, with_entropies=True, **kwargs).entropies
    assert entropies is not None
    return entropies


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Return a batch of policies that differ by about a fifth per token, and some by far more, so
    that every clip applies.
    """
    random = torch.Generator().manual_seed(7)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(NUM_ROWS, LENGTH, generator=random) * scale

    logits = torch.randn(NUM_ROWS, LENGTH, VOCAB, generator=random) * 2
    input_ids = torch.randint(VOCAB, (NUM_ROWS, LENGTH), generator=random)
    completion_mask = torch.arange(NUM_COMPLETION) < torch.tensor(LENGTHS)[:, None]
    current = token_logprobs(logits, input_ids)
    proximal = current + noise(0.3)
    return {
        "logits": logits,
        "input_ids": input_ids,
        "completion_mask": completion_mask,
        "loss_mask": torch.nn.functional.pad(completion_mask, (NUM_PROMPT, 0)),
        "logprobs": proximal,
        "behaviour": proximal + noise(0.6),
        "ref_logprobs": current + noise(0.5),
        "advantages": torch.tensor([1.0, -0.7, -1.5, 0.4]),
    }


def trl_policy_loss(
    tensors: dict[str, torch.Tensor], logits: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Return GRPOTrainer's loss of these logits."""

    def logps_and_entropies(
        _model: Any, input_ids: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Any, Any, None]:
        kept, targets = logits[:, :-1][:, -NUM_COMPLETION:], input_ids[:, -NUM_COMPLETION:]
        return (
            trl_utils.selective_log_softmax(kept, targets),
            trl_utils.entropy_from_logits(kept),
            None,
        )

    fields: dict[str, Any] = {
        "loss_type": "bnpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "delta": None,
        "ratios": None,
        **settings,
    }
    trainer = SimpleNamespace(
        **fields,
        args=SimpleNamespace(
            delta=fields["delta"], use_bias_correction_kl=False, steps_per_generation=1
        ),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=fields["ratios"] is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=fields["entropy_coef"] != 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=logps_and_entropies,
    )
    mask = tensors["completion_mask"]
    inputs = {
        "prompt_ids": tensors["input_ids"][:, :NUM_PROMPT],
        "prompt_mask": torch.ones(NUM_ROWS, NUM_PROMPT, dtype=torch.long),
        "completion_ids": tensors["input_ids"][:, NUM_PROMPT:],
        "completion_mask": mask.long(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["logprobs"][:, NUM_PROMPT:],
        "ref_per_token_logps": tensors["ref_logprobs"][:, NUM_PROMPT:],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": fields["ratios"],
    }
    loss: torch.Tensor = trl_grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def our_policy_loss(
    name: str,
    tensors: dict[str, torch.Tensor],
    logits: torch.Tensor,
    aggregation: Any = "token",
    **kwargs: Any,
) -> torch.Tensor:
    weights = sequence_weights(LENGTHS, aggregation, max_tokens=MAX_TOKENS)
    columns = {
        name: tensors[name]
        for name in ("loss_mask", "logprobs", "ref_logprobs", "advantages", "prox_logprobs")
        if name in tensors
    }
    batch = {  # type: ignore[misc]
        **columns,
        "loss_weights": torch.tensor(weights),
        "entropy": torch.nn.functional.pad(entropies_of(logits)[:, :-1], (1, 0)),
    }
    loss, _ = LOSSES[name](token_logprobs(logits, tensors["input_ids"]), batch, **kwargs)
    return loss / tensors["loss_mask"].sum()


def assert_same(ours: Any, theirs: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Check that values and gradients of the logits are the same."""
    results = []
    for loss in (ours, theirs):
        logits = tensors["logits"].clone().requires_grad_()
        value = loss(logits)
        (grad,) = torch.autograd.grad(value, logits)
        results.append((value.detach(), grad))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-4)
    assert results[0][1].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "aggregation", "kwargs", "settings"),
    [
        ("grpo", "sequence", {}, {"loss_type": "grpo"}),
        ("grpo", "token", {"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("grpo", "constant", {}, {"loss_type": "dr_grpo"}),
        ("ppo", "token", {"dual_clip": 1.3}, {"delta": 1.3}),
        ("grpo", "token", {"kl_coef": 0.1}, {"beta": 0.1}),
        ("grpo", "token", {"entropy_coef": 0.05}, {"entropy_coef": 0.05}),
        (
            "gspo",
            "sequence",
            {"clip_low": 0.05, "clip_high": 0.1},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 0.05,
                "epsilon_high": 0.1,
            },
        ),
        ("cispo", "token", {"ratio_cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ],
)
def test_policy_losses_match_trl(
    name: str,
    aggregation: str,
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> None:
    assert_same(
        lambda logits: our_policy_loss(name, tensors, logits, aggregation, **kwargs),
        lambda logits: trl_policy_loss(tensors, logits, **settings),
        tensors,
    )


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_sampling_matches_trl(mode: str, tensors: dict[str, torch.Tensor]) -> None:
    """trl makes the ratios while it generates (``token_truncate``, ``token_mask``); here they are
    made as there, and its loss applies them."""
    ratios = (tensors["logprobs"] - tensors["behaviour"]).exp()[:, NUM_PROMPT:]
    assert (ratios > 1.5).any()
    ratios = ratios.clamp(max=1.5) if mode == "truncate" else ratios.masked_fill(ratios > 1.5, 0.0)
    ours = {**tensors, "prox_logprobs": tensors["logprobs"], "logprobs": tensors["behaviour"]}
    kwargs = {"importance_cap": 1.5, "importance_mode": mode, "kl_coef": 0.1}
    assert_same(
        lambda logits: our_policy_loss("decoupled_ppo", ours, logits, **kwargs),
        lambda logits: trl_policy_loss(tensors, logits, ratios=ratios, beta=0.1),
        tensors,
    )


def test_logprobs_and_entropies_match_trl(tensors: dict[str, torch.Tensor]) -> None:
    assert_same(
        lambda logits: (
            token_logprobs(logits, tensors["input_ids"], chunk_numel=30) * tensors["ref_logprobs"]
        ).sum(),
        lambda logits: (
            trl_utils.selective_log_softmax(logits[:, :-1], tensors["input_ids"][:, 1:])
            * tensors["ref_logprobs"][:, 1:]
        ).sum(),
        tensors,
    )
    assert_same(
        lambda logits: (entropies_of(logits, chunk_numel=30) * tensors["ref_logprobs"]).sum(),
        lambda logits: (trl_utils.entropy_from_logits(logits) * tensors["ref_logprobs"]).sum(),
        tensors,
    )


def test_sft_loss_matches_transformers(tensors: dict[str, torch.Tensor]) -> None:
    """SFTTrainer's default loss is the model's own."""
    labels = tensors["input_ids"].masked_fill(~tensors["loss_mask"], -100)
    num_tokens = tensors["loss_mask"].sum()
    assert_same(
        lambda logits: our_policy_loss("sft", tensors, logits),
        lambda logits: ForCausalLMLoss(logits, labels, VOCAB, num_items_in_batch=num_tokens),
        tensors,
    )


@pytest.mark.parametrize("beta", [0.1, 1.5])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_dpo_matches_trl(loss_type: str, beta: float, tensors: dict[str, torch.Tensor]) -> None:
    mask = tensors["loss_mask"]
    # rows 0, 1 and 2, 3 are our pairs; trl has all preferred ones first
    chosen_first = [
        0,
        2,
        1,
        3,
    ]

    def theirs(logits: torch.Tensor) -> torch.Tensor:
        def model(**_: Any) -> Any:
            logps = (
                trl_utils.selective_log_softmax(logits[:, :-1], tensors["input_ids"][:, 1:])
                * mask[:, 1:]
            )
            ignored = torch.zeros_like(logps)
            order = torch.tensor(chosen_first)
            return SimpleNamespace(
                log_probs=logps[order], entropy=ignored, mean_logits=ignored, is_top1=ignored > 0
            )

        trainer = SimpleNamespace(
            accelerator=ACCELERATOR,
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=beta,
            label_smoothing=0.0,
            use_weighting=False,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
        )
        ref = (tensors["ref_logprobs"] * mask).sum(-1)[chosen_first]
        inputs = {
            "input_ids": tensors["input_ids"][chosen_first],
            "completion_mask": mask[chosen_first].long(),
            "attention_mask": torch.ones(NUM_ROWS, LENGTH),
            "ref_chosen_logps": ref[:2],
            "ref_rejected_logps": ref[2:],
        }
        loss: torch.Tensor = trl_dpo.DPOTrainer._compute_loss(trainer, model, inputs, False)
        return loss

    def ours(logits: torch.Tensor) -> torch.Tensor:
        batch = {
            "loss_mask": mask,
            "ref_logprobs": tensors["ref_logprobs"],
            "pair": torch.tensor([0, 0, 5, 5]),
        }
        loss, _ = LOSSES["dpo"](
            token_logprobs(logits, tensors["input_ids"]), batch, beta=beta, loss_type=loss_type
        )
        return loss / 2

    assert_same(ours, theirs, tensors)


@pytest.mark.parametrize("center", [None, 0.3])
@pytest.mark.parametrize("margin", [None, (0.5, -1.0)])
def test_reward_model_matches_trl(
    margin: tuple[float, float] | None, center: float | None, tensors: dict[str, torch.Tensor]
) -> None:
    last = NUM_PROMPT + torch.tensor(LENGTHS) - 1

    def theirs(logits: torch.Tensor) -> torch.Tensor:
        rewards = logits[torch.arange(NUM_ROWS), last, :1]
        trainer = SimpleNamespace(
            accelerator=ACCELERATOR,
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(center_rewards_coefficient=center),
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs: dict[str, Any] = {"attention_mask": torch.ones(NUM_ROWS, LENGTH)}
        if margin is not None:
            inputs["margin"] = torch.tensor(margin)
        loss: torch.Tensor = trl_reward.RewardTrainer.compute_loss(
            trainer, lambda **_: SimpleNamespace(logits=rewards[[0, 2, 1, 3]]), inputs
        )
        return loss

    def ours(logits: torch.Tensor) -> torch.Tensor:
        batch = {"loss_mask": tensors["loss_mask"], "pair": torch.tensor([0, 0, 1, 1])}
        if margin is not None:
            batch["margin"] = torch.tensor([margin[0], margin[0], margin[1], margin[1]])
        loss, _ = LOSSES["reward_model"](
            logits[..., 0], batch, **({} if center is None else {"center_coef": center})
        )
        return loss / 2

    assert_same(ours, theirs, tensors)


def test_soft_overlong_punishment_matches_trl() -> None:
    lengths = range(16)
    theirs = trl_rewards.get_soft_overlong_punishment(12, 5)([[0] * length for length in lengths])
    assert [
        soft_overlong_punishment(length, max_tokens=12, cache_tokens=5) for length in lengths
    ] == pytest.approx(theirs)
