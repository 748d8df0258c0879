"""Engine for sequence classification in transformers: reward models and other classifiers.

``RolloutController`` drives it like an engine that generates. The result of a request has an entry
for each label: its number as the token, and its logit as the log-probability.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from helmsman.api.engines import InferenceEngine
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weights import Weights
from helmsman.engines._models.folders import read_config, refused
from helmsman.engines._models.model import resolve_dtype, without_progress_bars
from helmsman.engines._serving.generation import check_request

_MAX_BATCH_TOKENS = 16384
"""Maximum tokens of a forward pass, padding included; a longer text is computed alone."""
_OTHER_TASKS = re.compile(r"(.*\.)?(pooler|lm_head|cls|mtp|masked_bias|[a-z]+_predictions)(\..*)?")
"""Names of stored tensors for other tasks. No score depends on them."""


class ClassifierEngine(InferenceEngine):
    """A model for sequence classification on one device. Texts that wait are computed together.

    Args:
        model: Local folder in the Hugging Face layout.
        max_model_len: Maximum tokens of a text, plus one.
        dtype: Type of the weights, such as ``bfloat16``; ``auto`` is bfloat16 on devices, float32
            on the host.
        seed: Unused, as the weights are those of the folder.
    """

    def __init__(self, model: str, max_model_len: int, dtype: str = "auto", seed: int = 0) -> None:
        self._folder, self._dtype, self._max_len = model, dtype, max_model_len
        self._waiting: list[tuple[list[int], asyncio.Future[list[float]]]] = []
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)  # also one pass at a time where a caller is cancelled

    def initialize(self) -> None:
        """Read the model.

        Raises:
            ValueError: The folder has no whole model, or transformers would read another model from
                it: one with random parameters, or one that lacks stored parameters.
        """
        known = read_config(self._folder).get("architectures")
        current_platform.set_device(0)
        self._device = current_platform.device(0)
        dtype = resolve_dtype(self._dtype)
        with without_progress_bars():
            model, read = AutoModelForSequenceClassification.from_pretrained(
                self._folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        kind = type(model).__name__
        wrong = [f"lacks {each}" for each in sorted(read["missing_keys"])]
        extra = sorted(read["unexpected_keys"])
        wrong += [f"also has {each}" for each in extra if not _OTHER_TASKS.fullmatch(each)]
        if known and kind.lower() != known[0].lower():
            wrong.append(f"is of a {known[0]}")
        if wrong:
            expected = f"a {kind} with all of its parameters, as transformers reads it"
            step = "A function can call code of its own"
            raise refused(self._folder, f"it {wrong[0]}", expected, step)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._text_config = model.config.get_text_config()
        self._pad = self._text_config.pad_token_id
        self._model: Any = model.to(self._device).eval()

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Classify one text.

        Raises:
            ValueError: The text is empty or too long, or has tokens outside the vocabulary.
            Exception: The error of the forward pass that this text was part of.
        """
        check_request(request, max_model_len=self._max_len, vocab_size=self._vocab_size)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request.prompt_ids, future))
        async with self._turn:
            while not future.done():  # earlier callers, which may be cancelled, compute others too
                await self._compute()
        row = future.result()
        return GenerationResult(
            request_id=request.request_id,
            token_ids=list(range(len(row))),
            logprobs=row,
            versions=[0] * len(row),
            stop_reason="stop",
        )

    async def _compute(self) -> None:
        """Compute the texts that wait longest, in one forward pass."""
        count = longest = 0
        for ids, _ in self._waiting:
            longest = max(longest, len(ids))
            if count and (count + 1) * longest > _MAX_BATCH_TOKENS:
                break
            count += 1
        batch = self._waiting[:count]
        try:
            loop, texts = asyncio.get_running_loop(), [ids for ids, _ in batch]
            rows = await loop.run_in_executor(self._thread, self._logits, texts)
        except Exception as error:  # noqa: BLE001 - models raise any error, for these texts alone
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), row in zip(batch, rows, strict=True):
                future.set_result(row)
        del self._waiting[:count]

    @torch.no_grad()
    def _logits(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Return the logits of all labels for each text.

        Decoders are read at the last token that is not ``pad_token_id``. A model without one gets a
        token with which no text ends, so that a text has the same score in any batch.
        """
        longest, ends, pad = max(map(len, prompts)), {each[-1] for each in prompts}, self._pad
        if pad is None or not 0 <= pad < self._vocab_size:
            pad = next(each for each in range(self._vocab_size) if each not in ends)
        self._text_config.pad_token_id = pad
        padded = [[*each, *[pad] * (longest - len(each))] for each in prompts]
        mask = [[1] * len(each) + [0] * (longest - len(each)) for each in prompts]
        ids, masks = (torch.tensor(each, device=self._device) for each in (padded, mask))
        rows: list[list[float]] = self._model(ids, attention_mask=masks).logits.float().tolist()
        return rows

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Return 0: all texts are computed to their end, which is near."""
        return 0

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Refuse an update."""
        raise NotImplementedError("ClassifierEngine keeps the weights of its folder")

    def get_version(self) -> int:
        """Return 0."""
        return 0

    def destroy(self) -> None:
        """Release the model. Idempotent."""
        self._thread.shutdown()
        self._model = None
        current_platform.empty_cache()
