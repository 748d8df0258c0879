"""Train on episodes of two turns: the model writes digits, and a calculator adds their sum."""

import asyncio
from pathlib import Path
from typing import Any

from helmsman import Job, RolloutController, SamplingParams, TrainController, make_scheduler
from helmsman.api.advantages import group_advantages
from helmsman.recipes import make_model
from helmsman.recipes.tokens import FolderTokenizer

TRAIN = "helmsman.engines.train.FSDPTrainEngine"
ROLLOUT = "helmsman.engines.rollout.HFRolloutEngine"


async def episode(rollout: RolloutController, text: FolderTokenizer, prompt: str) -> Any:
    """Generate in turns; the tool's tokens are read by the model and not trained on."""
    ids = text.encode_prompt(prompt)
    mask, logprobs, reward = [0] * len(ids), [0.0] * len(ids), 0.0
    for _ in range(2):
        answer = await rollout.async_generate_one(ids, SamplingParams(max_new_tokens=8))
        digits = [int(each) for each in text.decode(answer.token_ids) if each.isdigit()]
        tool = text.encode_answer(f"={sum(digits)}")
        ids = ids + answer.token_ids + tool
        mask += [1] * len(answer.token_ids) + [0] * len(tool)
        logprobs += answer.logprobs + [0.0] * len(tool)
        reward += len(digits) / 16
    return reward, {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs}


async def batch(rollout: RolloutController, text: FolderTokenizer) -> Any:
    prompts = [f"{n}+{n}=" for n in range(4) for _ in range(8)]  # groups of eight answers
    return await asyncio.gather(*(episode(rollout, text, prompt) for prompt in prompts))


if __name__ == "__main__":
    model = str(make_model(Path("runs/tool"), num_layers=2, width=64))
    jobs, text = [Job(role="train"), Job(role="rollout")], FolderTokenizer(model)
    with make_scheduler("local") as scheduler:
        train = TrainController(scheduler, TRAIN, jobs[0], (), {"model": model, "lr": 3e-3})
        with train, RolloutController(scheduler, ROLLOUT, jobs[1], (), {"model": model}) as rollout:
            for step in range(10):
                found = asyncio.run(batch(rollout, text))
                advantages = iter(group_advantages([reward for reward, _ in found], group_size=8))
                samples = [{**sample, "advantages": next(advantages)} for _, sample in found]
                train.train_batch(samples, "grpo")
                train.update_rollout(rollout)
                print(f"step {step}  reward {sum(reward for reward, _ in found) / 32:.3f}")
