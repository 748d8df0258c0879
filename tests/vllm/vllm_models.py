"""Small models with random weights, and their log-probabilities by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.api.generation import GenerationResult

VOCAB = 128
EOS = 2
MAX_LEN = 512
_SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
    # Far from the usual 0.02, so that logits differ enough for rounding not to decide between
    # tokens.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **_SIZE, "tie_word_embeddings": False}
QWEN2_TIED: dict[str, Any] = {"model_type": "qwen2", **_SIZE, "tie_word_embeddings": True}
"""With biases in its fused projection, and one tensor for embeddings and head."""
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    **_SIZE,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **_SIZE,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "num_experts": 4,
    "norm_topk_prob": True,
}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", **_SIZE, "num_local_experts": 4}

ENGINE: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_concurrency": 16,
    "enforce_eager": True,
    "dtype": "float32",
}
SPEC_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def model_of(config: Mapping[str, Any], seed: int) -> Any:
    """Return a float32 model with weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32
        ).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                # they begin as zeros, which would hide a missing update
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def folder_of(model: Any, path: Path) -> str:
    """Save a model for vLLM; returns the path."""
    model.save_pretrained(path)
    return str(path)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that a trainer sends: each tensor by its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


@torch.no_grad()
def logprobs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities (T,) of the tokens that follow the prompt."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def is_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Return whether each token is the model's most likely one."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == list(tokens)


def differences(
    model: Any, prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult]
) -> torch.Tensor:
    """Return the absolute differences between log-probabilities of vLLM and of the model."""
    parts = [
        (logprobs_of(model, prompt, result.token_ids) - torch.tensor(result.logprobs)).abs()
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return torch.cat(parts)


def report(what: str, found: torch.Tensor) -> None:
    """Print the figures, which pytest shows with -s, or when a test fails."""
    print(
        f"{what}: {found.numel()} tokens, log-probabilities differ by {found.max():.2e} at most, "
        f"{found.mean():.2e} on average"
    )
