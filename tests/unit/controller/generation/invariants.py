"""What holds of every request that has ended, whatever has happened to its instances."""

from __future__ import annotations

from concurrent.futures import Future

from helmsman.api.errors import InstanceLostError, RequestDeadlineError, WorkerFailedError
from helmsman.api.generation import GenerationResult
from helmsman.controller._generation.request import RequestState


def end_of(future: Future[GenerationResult], length: int, versions: range) -> RequestState:
    """The state that a request has ended in.

    Args:
        length: tokens that it has unless it ends early.
        versions: of the weights that can have made its tokens.
    Raises: AssertionError for an end that cannot be.
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
    assert result.versions == sorted(result.versions), f"weights went back: {result}"
    assert all(version in versions for version in result.versions), (
        f"weights that did not serve in {versions}: {result}"
    )
    if result.stop_reason != "abort":
        assert num == length, f"{num} tokens of {length}, of all attempts together: {result}"
        return RequestState.DONE
    assert num <= length, result
    return RequestState.PARTIAL if num else RequestState.ABORTED
