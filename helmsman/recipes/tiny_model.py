"""A small random Llama with a character tokenizer and a chat template, for tests and examples."""

from __future__ import annotations

import json
import string
from pathlib import Path

CHARACTERS = string.digits + string.ascii_letters + " +-*/=?.:,\n\\{}$<>"
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{{ '<eos>' if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(
    folder: Path, *, num_layers: int = 4, width: int = 128, num_positions: int = 512, seed: int = 0
) -> Path:
    """Write a small random Llama as a Hugging Face folder.

    The initial weights have a large variance, so that training soon changes greedy answers.

    Args:
        folder: The folder to write.
        num_layers: Number of decoder layers.
        width: Hidden size.
        num_positions: Maximum sequence length in tokens.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write only the tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL, *CHARACTERS]
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        **({"chat_template": chat_template} if chat_template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
