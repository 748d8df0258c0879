"""Test that PEFT reads the adapters that are written here, and that its own are read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import MIXTRAL, QWEN2
from tests.engines.train.layouts import SAMPLES

peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.timeout(600)


def logprobs(model: Any) -> list[torch.Tensor]:
    """Return the log-probabilities of the samples' tokens, by plain torch."""
    rows = []
    for sample in SAMPLES:
        tokens = torch.tensor(sample["input_ids"])
        with torch.no_grad():
            found = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), found.gather(-1, tokens[1:, None])[:, 0]]))
    return rows


def require_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def trained_by_two(base: str, adapter: str, out: str) -> list[torch.Tensor]:
    """Continue an adapter for two steps on this rank, write it, and return log-probabilities."""
    engine = FSDPTrainEngine(model=base, lora={"path": adapter}, lr=1e-2, rendezvous_timeout_s=60)
    engine.initialize()
    rank = engine.data_parallel_rank
    for _ in range(2):
        engine.train_batch(SAMPLES[rank::2], "sft")
    engine.export_adapter(out)
    found = engine.forward(SAMPLES)
    engine.destroy()
    return found


DENSE = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (QWEN2, DENSE),
        (QWEN2, {**DENSE, "init_lora_weights": "gaussian"}),
        (QWEN2, {**DENSE, "init_lora_weights": "orthogonal"}),
        (QWEN2, {**DENSE, "use_rslora": True}),
        (MIXTRAL, EXPERTS),
    ],
    ids=["plain", "gaussian", "orthogonal", "rslora", "experts"],
)
def test_peft_and_engines_agree(
    make: Make, tmp_path: Path, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    base, theirs, ours = (str(tmp_path / each) for each in ("base", "theirs", "ours"))
    make(model=config).export_hf(base)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=8, **fields)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it is 0 at first, and the adapter without effect
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(theirs)
    without = make(model=base).forward(SAMPLES)
    found = make(model=base, lora={"path": theirs}).forward(SAMPLES)
    require_equal(found, logprobs(model))
    assert apart(found, without) > 0.1
    of_ranks = run_ranks(trained_by_two, 2, base, theirs, ours)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ours).eval()
    for rows in of_ranks:
        require_equal(rows, logprobs(again))
    assert apart(of_ranks[0], found) > 0.01
