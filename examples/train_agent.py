"""Train an agent that is written with OpenAI's SDK, on any machine, in about a minute."""

from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from helmsman.recipes import GRPO, make_model


async def agent(task: dict[str, str], base_url: str, api_key: str) -> float:
    """Ask twice; the reward is the share of digits in both answers."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    text = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for question in ("Are you sure?", "Thanks."):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            text += message.content or ""
            messages += [message, {"role": "user", "content": question}]
    return sum(map(str.isdigit, text)) / max(1, len(text))


if __name__ == "__main__":
    GRPO(
        model=make_model(Path("runs/tiny"), num_layers=2, width=64),
        data=[f"{n}+{n}=" for n in range(50)],
        agent=agent,
        steps=12, prompts_per_step=8, train={"lr": 3e-3}, rollout={"max_new_tokens": 12},
        overwrite=True,
    ).train()  # fmt: skip
