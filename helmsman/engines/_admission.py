"""What every rollout engine asks of a request before it takes it."""

from __future__ import annotations

from collections.abc import Sequence

from helmsman.api.generation import GenerationRequest


def check_request(
    request: GenerationRequest, *, max_model_len: int | None, vocab_size: int | None, limit: str = "max_model_len"
) -> None:
    """Raise ValueError for a request that no engine can do.

    Args:
        request: The request.
        max_model_len: Most tokens of a sequence, prompt and continuation; None where it is not known.
        vocab_size: Token ids are below this; None where it is not known.
        limit: Name of the setting that ``max_model_len`` comes from, for the message.
    """
    prompt, name, seed = request.prompt_ids, f"request {request.request_id!r}", request.sampling.seed
    if not prompt:
        raise ValueError(f"{name} has an empty prompt; expected at least one token")
    if max_model_len is not None and len(prompt) >= max_model_len:
        raise ValueError(
            f"{name} has a prompt of {len(prompt)} tokens, which leaves no room for a continuation within "
            f"{limit}={max_model_len}"
        )
    if min(prompt) < 0 or (vocab_size is not None and max(prompt) >= vocab_size):
        wrong = next(token for token in prompt if token < 0 or (vocab_size is not None and token >= vocab_size))
        expected = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise ValueError(f"{name} has the token {wrong} in its prompt; expected {expected}")
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"{name} has the seed {seed}; expected one from 0 to 2**64 - 1")


def check_samples_of_one(requests: Sequence[GenerationRequest]) -> None:
    """Raise ValueError unless these continue the same prompt."""
    for request in requests:
        if request.prompt_ids != requests[0].prompt_ids:
            raise ValueError(
                f"requests {requests[0].request_id!r} and {request.request_id!r} have different prompts; "
                "agenerate_samples takes samples of one"
            )
