"""Configurations of tiny models of several architectures."""

from __future__ import annotations

import random
from typing import Any

VOCAB = 50

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    # Far from the usual 0.02, so that logits differ enough for rounding not to decide between
    # tokens.
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

QWEN2: dict[str, Any] = {"model_type": "qwen2", **_SIZE, "tie_word_embeddings": True}
LLAMA: dict[str, Any] = {"model_type": "llama", **_SIZE, "tie_word_embeddings": False}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    **_SIZE,
    "tie_word_embeddings": False,
    "head_dim": 8,
}
MISTRAL_SLIDING: dict[str, Any] = {"model_type": "mistral", **_SIZE, "sliding_window": 6}
GEMMA3_MIXED: dict[str, Any] = {
    "model_type": "gemma3_text",
    **_SIZE,
    "tie_word_embeddings": False,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": VOCAB,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3_NEXT_LINEAR: dict[str, Any] = {
    "model_type": "qwen3_next",
    **_SIZE,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **_SIZE,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", **_SIZE, "num_local_experts": 4}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **_SIZE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""One layer with experts after a dense one."""


def random_tokens(length: int, seed: int) -> list[int]:
    """Draw tokens of the vocabulary."""
    return random.Random(seed).choices(range(VOCAB), k=length)
