"""Checks that hold for every request that has ended."""

from __future__ import annotations

from concurrent.futures import Future

from helmsman.api.errors import InstanceLostError, RequestDeadlineError, WorkerFailedError
from helmsman.api.generation import GenerationResult
from helmsman.controller._rollout.request import RequestState


def end_of(future: Future[GenerationResult], length: int, versions: range) -> RequestState:
    """Check how a request has ended and return its state.

    Args:
        future: The future of the request, which is done.
        length: Number of tokens of a request that does not end early.
        versions: Weight versions that served while the request ran.

    Returns:
        The state in which the request has ended.

    Raises:
        AssertionError: The result or the error is not a valid end of the request.
    """
    if future.cancelled():
        return RequestState.ABORTED
    if (error := future.exception()) is not None:
        assert isinstance(error, RequestDeadlineError | InstanceLostError | WorkerFailedError), (
            error
        )
        return RequestState.FAILED
    result = future.result()
    num = len(result.token_ids)
    assert len(result.versions) == len(result.logprobs) == num, result
    assert result.versions == sorted(result.versions), f"weight versions decrease: {result}"
    assert all(version in versions for version in result.versions), (
        f"weight versions outside {versions}: {result}"
    )
    if result.stop_reason != "abort":
        assert num == length, f"{num} tokens in all attempts, expected {length}: {result}"
        return RequestState.DONE
    assert num <= length, result
    return RequestState.PARTIAL if num else RequestState.ABORTED
