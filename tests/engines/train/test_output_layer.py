"""Test that a model returns statistics of its tokens without computing all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.engines._train.output_layer import return_statistics
from helmsman.engines._train.vocabulary import TokenStatistics
from tests.engines.small_models import GEMMA3_MIXED, GPT2, LLAMA, MIXTRAL, QWEN2, random_tokens

SOFT_CAPPED = {**GEMMA3_MIXED, "final_logit_softcapping": 2.0}
SCALED: dict[str, Any] = {**LLAMA, "model_type": "cohere", "logit_scale": 0.3}
DIVIDED: dict[str, Any] = {**LLAMA, "model_type": "granite", "logits_scaling": 4.0}
WITH_BIAS: dict[str, Any] = {**LLAMA, "model_type": "phi"}
CONFIGS = {
    "llama": LLAMA,
    "tied": QWEN2,
    "gpt2": GPT2,
    "experts": MIXTRAL,
    "soft-capped": SOFT_CAPPED,
    "scaled": SCALED,
    "divided": DIVIDED,
    "with bias": WITH_BIAS,
}


def built(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def asked(model: nn.Module, ids: torch.Tensor) -> TokenStatistics:
    statistics: TokenStatistics = model(
        input_ids=ids, targets=ids.roll(-1), with_entropies=True, group=None, use_cache=False
    )
    return statistics


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_return_statistics_equals_logits(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([random_tokens(9, seed=1), random_tokens(9, seed=2)])
    plain, model = built(config), built(config)
    logits = plain(input_ids=ids, use_cache=False).logits
    distribution = torch.distributions.Categorical(logits=logits)
    expected = (distribution.log_prob(ids.roll(-1)), distribution.entropy())
    return_statistics(model)
    forwards = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda *_: forwards.append(1))
    found = asked(model, ids)
    assert not forwards, "the model has computed the logits of all tokens"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.stack([*found]).sum().backward()  # type: ignore[list-item]
    torch.stack(expected).sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_return_statistics_unusual_head() -> None:
    """The layer before the logits is more than a matrix here."""

    class Doubled(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).cumsum(-1)

    def changed(model: Any) -> Any:
        head = Doubled(32, 50, bias=False)
        head.weight = model.lm_head.weight
        model.lm_head = head
        return model

    ids = torch.tensor([random_tokens(9, seed=1)])
    plain, model = changed(built(LLAMA)), changed(built(LLAMA))
    return_statistics(model)
    distribution = torch.distributions.Categorical(logits=plain(input_ids=ids).logits)
    torch.testing.assert_close(asked(model, ids).logprobs, distribution.log_prob(ids.roll(-1)))
