"""Tiny models that call tools: each of their answers is one token, then the end token."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.agents.chat_models import tokenizer_for

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The tools are not in the prompt, which keeps it short."""
LOOK = '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'
SECRETS = ["north", "south", "east", "west"]
BASH = [
    f'<tool_call>{{"name": "bash", "arguments": {{"command": "echo {text}"}}}}</tool_call>'
    for text in ("hello", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
]
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look for something.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}
CHAT_TOOL = {"type": "function", "function": TOOL}
SHOWN = "<returncode>0</returncode>\n<output>\nhello\n</output>"
"""A result as the coding agent writes it."""


ANSWERS = {LOOK: 0.5, **dict.fromkeys(SECRETS, 0.125)}


def make_toy(folder: Path, answers: Mapping[str, float] = ANSWERS) -> Path:
    """Write a model that answers every prompt by one of some texts, almost always.

    The layers add nothing to the embedding of the last token, which selects the logits: those of
    the answers after a prompt, and the end token after any other token.

    Args:
        folder: The folder to write.
        answers: Probability of each answer.

    Returns:
        The folder.
    """
    from safetensors.numpy import save_file

    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([*answers])
    config = _config(tokenizer)
    size, width = config["vocab_size"], config["hidden_size"]
    embedding, head = np.zeros((2, size, width), np.float32)
    embedding[:, 0] = 1.0
    embedding[tokenizer.encode("<|im_start|>assistant\n")[-1]] = np.eye(width)[1]
    scale = math.sqrt(width)  # of the one dimension that is not 0 after the normalization
    head[tokenizer.eos_token_id, 0] = 10 / scale
    for text, probability in answers.items():
        head[tokenizer.convert_tokens_to_ids(text), 1] = (10 + math.log(probability)) / scale
    ones, zeros = np.ones(width, np.float32), np.zeros((width, width), np.float32)
    wide = np.zeros((config["intermediate_size"], width), np.float32)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = ones
        for name in "qkvo":
            weights[f"{layer}.self_attn.{name}_proj.weight"] = zeros
        for name in ("gate", "up"):
            weights[f"{layer}.mlp.{name}_proj.weight"] = wide
        weights[f"{layer}.mlp.down_proj.weight"] = np.ascontiguousarray(wide.T)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config})
    )
    tokenizer.save_pretrained(folder)
    return folder


def _config(tokenizer: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # vLLM on the CPU needs 32 dimensions or more
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 16384,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def train_toy(
    folder: Path,
    *,
    skill: float = 0.6,
    num_steps: int = 250,
    seed: int = 0,
    with_bash: bool = False,
) -> Path:
    """Train a model that looks in about half of its first turns, and then repeats the result.

    Args:
        folder: The folder to write.
        skill: Share of its training examples that are right after it has looked.
        num_steps: Training steps; copying the result takes a few hundred.
        seed: Of the weights and of the training data.
        with_bash: Also call the tool ``bash``.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([LOOK, *SECRETS, *(BASH if with_bash else [])])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_config(tokenizer)))
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads take four times the CPU time for these small tensors
    for _ in range(num_steps):
        rows = [_example(tokenizer, draw, skill, with_bash=with_bash) for _ in range(16)]
        size = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([each + [0] * (size - len(each)) for each, _ in rows])
        labels = torch.tensor([each + [-100] * (size - len(each)) for _, each in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(num_threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _example(tokenizer: Any, draw: random.Random, skill: float, *, with_bash: bool) -> Any:
    if with_bash and draw.random() < 0.4:
        chat = [
            {"role": "system", "content": "You work in a shell."},
            {"role": "user", "content": f"run {draw.randint(0, 999)}"},
        ]
        if draw.random() < 0.6:
            chat += [{"role": "assistant", "content": BASH[0]}, {"role": "tool", "content": SHOWN}]
        return _row(tokenizer, chat, draw.choice(BASH))
    secret = draw.choice(SECRETS)
    chat = [{"role": "user", "content": question(draw.randint(0, 999))}]
    has_looked = draw.random() < 0.75
    if has_looked:
        chat += [{"role": "assistant", "content": LOOK}, {"role": "tool", "content": secret}]
        answer = secret if draw.random() < skill else draw.choice(SECRETS)
    else:
        answer = LOOK if draw.random() < 0.4 else draw.choice(SECRETS)
    return _row(tokenizer, chat, answer)


def _row(tokenizer: Any, chat: list[dict[str, str]], answer: str) -> Any:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    own = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt + own, [-100] * len(prompt) + own


def question(number: int) -> str:
    return f"where {number}"
