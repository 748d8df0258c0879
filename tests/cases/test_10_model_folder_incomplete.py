"""Case 10: a model folder whose files lack weights is refused, never completed by random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helmsman import Job, RolloutController, TrainController, make_scheduler
from helmsman.api.errors import EngineCallError
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.models import folders as made
from tests.engines.models.folders import Change, added, entries, renamed, without
from tests.engines.small_models import QWEN2, QWEN3_MOE

TRAINER = "helmsman.engines.train.FSDPTrainEngine"
ROLLOUT = "helmsman.engines.rollout.HFRolloutEngine"


def _moe(change: Change) -> Change:
    return lambda folder: change(made.write(folder, QWEN3_MOE))


FOLDERS: dict[str, tuple[Change, str]] = {
    "untied head left out": (without("lm_head"), "1 missing: lm_head.weight"),
    "one matrix left out": (without("layers.1.mlp.down_proj"), "1 missing"),
    "all names with a prefix": (renamed(lambda name: f"module.{name}"), "begin with 'module.'"),
    "a layer fewer than the configuration": (without(".layers.1."), "the files have 1 layers"),
    # Neighbours.
    "compiled model": (renamed(lambda name: f"_orig_mod.{name}"), "begin with '_orig_mod.'"),
    "merged adapter that kept its names": (
        renamed(lambda name: f"base_model.model.{name}"),
        "begin with 'base_model.model.'",
    ),
    "projections fused for serving": (
        renamed(lambda name: name.replace("q_proj", "qkv_proj")),
        "2 missing: model.layers.0.self_attn.q_proj.weight, .*; 2 unexpected: .*qkv_proj",
    ),
    "configuration of a model with biases": (entries(attention_bias=True), "8 missing: .*bias"),
    "embeddings left out, untied": (without("embed_tokens"), "1 missing: model.embed_tokens"),
    "tied model of which neither name is left": (
        lambda folder: without("embed_tokens")(made.write(folder, QWEN2)),
        "1 missing: model.embed_tokens",
    ),
    "experts of another number": (_moe(entries(num_local_experts=8)), "missing: .*experts.4"),
    "all experts left out": (_moe(without("experts")), "24 missing: .*experts.0"),
    "adapter's tensors beside the model's": (
        added(model__layers__0__self_attn__q_proj__lora_A__weight=torch.zeros(2, 32)),
        "1 unexpected: .*lora_A",
    ),
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HELMSMAN_PLATFORM", "cpu")


@pytest.mark.parametrize("name", FOLDERS)
def test_refused_by_every_engine(name: str, tmp_path: Path) -> None:
    change, message = FOLDERS[name]
    change(made.write(tmp_path))
    trainer, rollout = FSDPTrainEngine(model=str(tmp_path)), HFRolloutEngine(model=str(tmp_path))
    try:
        for engine in (trainer, rollout):
            with pytest.raises(ValueError, match=message):
                engine.initialize()
    finally:
        trainer.destroy()


def test_the_script_gets_the_message(tmp_path: Path) -> None:
    without("lm_head")(made.write(tmp_path))
    fields = {"model": str(tmp_path)}
    with make_scheduler("local", preload=[TRAINER.rpartition(".")[0]]) as scheduler:
        with (
            pytest.raises(EngineCallError, match="1 missing: lm_head.weight, .* tie_word"),
            TrainController(scheduler, TRAINER, Job(role="train"), engine_kwargs=fields) as train,
        ):
            train.initialize()
        with (
            pytest.raises(EngineCallError, match="1 missing: lm_head.weight, .* tie_word"),
            RolloutController(scheduler, ROLLOUT, Job(role="roll"), engine_kwargs=fields) as roll,
        ):
            roll.initialize()
