"""Tiny judges whose weights are set by hand."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from helmsman.recipes.tiny_model import CHARACTERS, CHAT_TEMPLATE, SPECIAL, make_tokenizer

VOCABULARY = [*SPECIAL, *CHARACTERS]
IS_DIGIT = torch.tensor([each in string.digits for each in VOCABULARY])


def _config(width: int, **entries: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=False,
        **entries,
    )


@torch.no_grad()
def make_classifier(
    folder: Path, *, labels: Sequence[str] = ("LABEL_0",), template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a reward model that prefers digits: the last label's logit grows with their share.

    Its one layer averages all tokens, since queries and keys are 0.

    Args:
        folder: The folder to write.
        labels: Names of the labels; all but the last one have the logit 0.
        template: Chat template; None writes a tokenizer without one.

    Returns:
        The folder.
    """
    names = dict(enumerate(labels))
    model = LlamaForSequenceClassification(_config(8, num_labels=len(labels), id2label=names))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    embeddings = model.get_input_embeddings().weight
    embeddings[:, 0], embeddings[:, 1] = IS_DIGIT.float(), 1 - IS_DIGIT.float()
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.copy_(torch.eye(8))
    attention.o_proj.weight.copy_(4 * torch.eye(8))
    model.score.weight[-1, :2] = torch.tensor([1.0, -1.0])
    model.save_pretrained(folder)
    make_tokenizer(folder, template)
    return folder


@torch.no_grad()
def make_judge(folder: Path) -> Path:
    """Write a language model that answers 1 to a text that ends with a digit, and x to others."""
    width = len(VOCABULARY) + len(VOCABULARY) % 2  # even, for the rotary embedding
    model = LlamaForCausalLM(_config(width))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    model.get_input_embeddings().weight.copy_(torch.eye(width)[: len(VOCABULARY)])
    for token, is_digit in enumerate(IS_DIGIT.tolist()):
        model.lm_head.weight[VOCABULARY.index("1" if is_digit else "x"), token] = 1.0
    model.save_pretrained(folder)
    make_tokenizer(folder, None)
    return folder
