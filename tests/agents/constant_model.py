"""A rollout whose engine answers at once with one token, and a tokenizer for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from helmsman import InlineScheduler, Job, RolloutController
from helmsman.api.generation import GenerationRequest, GenerationResult
from tests.agents.chat_models import tokenizer_for
from tests.agents.toy_model import CHATML


class Constant:
    """A rollout engine that answers at once."""

    version = 0
    refuses = False

    def initialize(self) -> None:
        return

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        if self.refuses:
            raise ValueError("the prompt is too long")
        return GenerationResult(
            request_id=request.request_id,
            token_ids=[5],
            logprobs=[-1.0],
            versions=[self.version],
            stop_reason="length",
        )

    async def abort(self, request_ids: Any) -> None:
        return


@contextlib.contextmanager
def constant_rollout() -> Iterator[RolloutController]:
    with (
        InlineScheduler() as scheduler,
        RolloutController(scheduler, Constant, Job(role="rollout")) as made,
    ):
        yield made


def plain_tokenizer() -> Any:
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer
