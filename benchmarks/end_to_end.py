"""One side of the case end_to_end in its own process: python -m benchmarks.end_to_end SIDE WIDTH

Prints the tokens generated per second over training steps, and the parts of the time, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from helmsman.recipes.tiny_model import make_model, make_tokenizer

NUM_STEPS, NUM_WARM_UP = 8, 2
NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 8, 8, 64
PROMPTS = [f"{number}+{number}=" for number in range(64)]


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return rewards in TRL's form, which both sides use."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def write_model(folder: Path, width: int) -> str:
    """Write a random Llama without a chat template, so that both sides give it the same prompts."""
    make_model(folder, width=width, num_positions=256)
    make_tokenizer(folder, chat_template=None)
    return str(folder)


def run_helmsman(model: str, out: Path) -> tuple[float, float]:
    """Train by the recipe with its defaults; returns tokens and seconds of the measured steps."""
    from helmsman.recipes import GRPO

    GRPO(
        model,
        PROMPTS,
        [digits],
        steps=NUM_STEPS,
        prompts_per_step=NUM_PROMPTS,
        samples_per_prompt=GROUP_SIZE,
        rollout={"max_new_tokens": MAX_NEW_TOKENS},
        checkpoints={"every": NUM_STEPS, "export": "none"},
        out=str(out),
    ).train()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["step"] > NUM_WARM_UP]
    tokens = sum(row["response_length/mean"] for row in measured) * NUM_PROMPTS * GROUP_SIZE
    for name in sorted({key for row in measured for key in row if key.startswith("time/")}):
        mean = sum(row[name] for row in measured) / len(measured)
        print(f"{name} {mean:.3f}", file=sys.stderr)
    return tokens, sum(row["time/step"] for row in measured)


def run_trl(model: str, out: Path) -> tuple[float, float]:
    """Train by TRL's GRPOTrainer; returns tokens and seconds of the measured steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    config = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        callbacks=[Clock()],
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    lengths = [row["completions/mean_length"] for row in rows][NUM_WARM_UP:]
    tokens = sum(lengths) * NUM_PROMPTS * GROUP_SIZE
    return tokens, ends[-1] - ends[NUM_WARM_UP - 1]


def run_bare(model: str, out: Path) -> tuple[float, float]:
    """Do only the model's work in one process: a decoding loop, a backward pass, a step of AdamW.

    The rewards are counted but there is no old policy, no checkpoint, no log and no sync. This is
    the least time of any trainer that runs transformers' layers on these cores.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    del out
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    tokens, began = 0, 0.0
    for step in range(NUM_STEPS):
        if step == NUM_WARM_UP:
            tokens, began = 0, time.monotonic()
        chosen = [
            PROMPTS[(step * NUM_PROMPTS + each) % len(PROMPTS)] for each in range(NUM_PROMPTS)
        ]
        rows = [ids for ids in tokenizer(chosen)["input_ids"] for _ in range(GROUP_SIZE)]
        longest = max(map(len, rows))
        prompts = torch.tensor([[0] * (longest - len(ids)) + ids for ids in rows])
        is_real = (
            torch.arange(longest)[None]
            >= torch.tensor([longest - len(ids) for ids in rows])[:, None]
        )
        sequence, cache, following = prompts, None, prompts
        alive = torch.ones(len(rows), dtype=torch.bool)
        mask = is_real.long()
        with torch.inference_mode():
            for _ in range(MAX_NEW_TOKENS):
                output = policy(
                    following, attention_mask=mask, past_key_values=cache, logits_to_keep=1
                )
                cache = output.past_key_values
                following = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
                sequence = torch.cat([sequence, following], 1)
                mask = torch.cat([mask, alive[:, None].long()], 1)
                alive = alive & (following[:, 0] != tokenizer.eos_token_id)
                if not alive.any():
                    break
        counted = mask[:, longest:].bool()
        tokens += int(counted.sum())
        texts = tokenizer.batch_decode(sequence[:, longest:])
        rewards = torch.tensor(digits(texts)).view(NUM_PROMPTS, GROUP_SIZE)
        scale = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / scale).view(-1, 1)
        logits = policy(
            sequence.clone(), attention_mask=mask, logits_to_keep=counted.shape[1] + 1
        ).logits[:, :-1]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), sequence[:, longest:].flatten(), reduction="none"
        ).view(counted.shape)
        loss = -(advantages * logprobs * counted).sum() / counted.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return tokens, time.monotonic() - began


SIDES = {"helmsman": run_helmsman, "trl": run_trl, "bare": run_bare}


def main() -> int:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("width", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options.width)
        side = SIDES[options.side]
        real = os.dup(1)  # standard output is for the figure only
        os.dup2(2, 1)
        tokens, seconds = side(model, Path(folder) / "out")
        sys.stdout.flush()
        os.dup2(real, 1)
    print(json.dumps({"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
