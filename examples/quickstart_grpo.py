"""Train a tiny random model by GRPO with a reward of your own, on any machine, in about a
minute."""

from pathlib import Path

from helmsman.recipes import GRPO, make_model


def digits(completion: str) -> float:
    """The share of an answer's characters that are digits."""
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


if __name__ == "__main__":
    GRPO(
        model=make_model(Path("runs/tiny"), num_layers=2, width=64),
        data=[f"{n}+{n}=" for n in range(50)],
        rewards=[digits],
        steps=12, prompts_per_step=8, train={"lr": 3e-3}, rollout={"max_new_tokens": 12},
        overwrite=True,
    ).train()  # fmt: skip
