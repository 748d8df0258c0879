"""A tiny model that calls tools: each of its answers is one token, then the end token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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


SHOWN = "<returncode>0</returncode>\n<output>\nhello\n</output>"
"""A result as the coding agent writes it."""


def make_toy(
    folder: Path,
    *,
    skill: float = 0.6,
    num_steps: int = 250,
    seed: int = 0,
    with_bash: bool = False,
) -> Path:
    """Write a model that looks in about half of its first turns, and then tells what it found.

    Args:
        folder: The folder to write.
        skill: Share of its training examples that are right after it has looked.
        num_steps: Training steps, of which copying what it found takes a few hundred.
        seed: Of the weights and of the training data.
        with_bash: Also call the tool ``bash``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([LOOK, *SECRETS, *(BASH if with_bash else [])])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM on the CPU needs 32 dimensions or more
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
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
