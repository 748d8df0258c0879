"""vLLM without Helmsman, for comparison: reads orders from stdin, a JSON object a line.

The first one has the arguments of vllm.LLM. Each further one has prompts and their number of new
tokens, and is answered with the tokens per second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def rate_of(generate: Callable[[], int]) -> float:
    """Return the tokens per second of the better one of two rounds, after a first one."""
    rates = []
    for _ in range(3):
        started = time.monotonic()
        rates.append(generate() / (time.monotonic() - started))
    return max(rates[1:])


def main() -> None:
    """Obey the orders until stdin is closed."""
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        order = json.loads(line)
        prompts: Any = [{"prompt_token_ids": each} for each in order["prompts"]]
        sampling = SamplingParams(
            max_tokens=order["new_tokens"], ignore_eos=True, logprobs=0, detokenize=False
        )

        def generate(prompts: Any = prompts, sampling: Any = sampling) -> int:
            results = llm.generate(prompts, sampling, use_tqdm=False)
            return sum(len(each.outputs[0].token_ids) for each in results)

        print(json.dumps({"rate": rate_of(generate)}), flush=True)


if __name__ == "__main__":
    main()
