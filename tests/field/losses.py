"""A loss that records the advantages of its samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helmsman.engines.losses import grpo_loss


def recorded(
    outputs: Any, batch: Mapping[str, torch.Tensor], *, path: str, **kwargs: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return GRPO's loss, and append tokens, mask and advantages of each sample to a file."""
    with Path(path).open("a") as file:
        names = ("input_ids", "loss_mask", "advantages")
        file.writelines(
            json.dumps(row) + "\n"
            for row in zip(*(batch[name].tolist() for name in names), strict=True)
        )
    return grpo_loss(outputs, batch, **kwargs)
