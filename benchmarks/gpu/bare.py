"""Tokens per second of transformers' own ``generate``, for comparison with the rollout engine:
python -m benchmarks.gpu.bare < request.json
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from helmsman.api.platforms import current_platform


def measure(request: dict[str, Any], *, compiles: bool) -> float:
    """Return tokens per second with a static cache: the second of two runs.

    Args:
        request: ``model``, ``prompts``, which are padded on the left, and ``new_tokens``.
        compiles: Whether transformers may compile the forward pass, as it does by itself on CUDA.
    """
    import torch

    from helmsman.engines._models.model import build_model

    device = current_platform.device()
    model: Any = build_model(request["model"], seed=0, dtype=torch.bfloat16).to(device)
    prompts, new_tokens = request["prompts"], request["new_tokens"]
    length = max(map(len, prompts))
    padded = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    for _ in range(2):
        started = time.monotonic()
        outputs = model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            cache_implementation="static",
            disable_compile=not compiles,
            pad_token_id=0,
        ).tolist()
        seconds = time.monotonic() - started
    return sum(len(output) - length for output in outputs) / seconds


def main() -> None:
    """Print the figures as JSON: with compilation, null where it is not available, and without."""
    request, figures = json.load(sys.stdin), {"eager": 0.0, "compiled": None}
    figures["eager"] = measure(request, compiles=False)
    if current_platform.name == "cuda":
        try:
            figures["compiled"] = measure(request, compiles=True)
        # A compiler may be missing on this machine, or fail in any way.
        except Exception as error:  # noqa: BLE001
            print(f"transformers could not compile its generation: {error}", file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
