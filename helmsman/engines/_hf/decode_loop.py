"""The decoding thread: it takes requests and commands between steps and resolves their futures.

A request waits until a slot is free, runs from its prefill to its last token, and is resolved
exactly once:

    WAITING -> RUNNING -> resolved with a result (stop, length, abort), or with a step's error
"""

from __future__ import annotations

import copy
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import nn

from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights
from helmsman.engines._hf.decode_batch import DecodeBatch
from helmsman.engines._models.adapter_files import is_adapter_in_files
from helmsman.engines._models.adapter_layers import detach_all
from helmsman.engines._serving.generation import Generation, already_in_flight, check_level
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.host_swap import HostSwap
from helmsman.engines.shared_base import SharedBase
from helmsman.engines.weight_transfer import incoming
from helmsman.engines.weights import PartialWeightUpdateError, apply_weights

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Sequence(Generation):
    def __init__(self, request: GenerationRequest, max_len: int) -> None:
        super().__init__(request, max_len)
        self.future: Future[GenerationResult] = Future()
        seed = request.sampling.seed
        self.seed = seed if seed is not None else secrets.randbits(63)

    def resolve(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.result())

    def fail(self, cause: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            error = RuntimeError(
                "a decoding step failed while this request was in flight: "
                f"{type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
            self.future.set_exception(error)


class DecodeLoop:
    """Continuous batching in its own thread, the only user of the model from then on.

    All public methods may be called from any thread. At most ``max_prefill_tokens`` prompt tokens,
    padding included, are computed between two decoding steps.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: DecodeBatch,
        *,
        max_len: int,
        max_prefill_tokens: int,
        base: SharedBase,
    ) -> None:
        self._model, self._base = model, base
        self._batch = batch
        self._max_len = max_len
        self._max_prefill_tokens = max_prefill_tokens
        self.version = 0
        """Weight version being served."""
        self.state = WeightState.AWAKE
        """While the weights are incomplete nothing is decoded, and requests wait or are aborted."""
        self._host_swap = HostSwap()
        """Holds the weights while the engine is asleep."""
        self._weight_group = WeightGroup(next(model.parameters()).device)
        self._num_generated = self._num_prefilled = 0
        self._waiting: deque[list[_Sequence]] = deque()
        """Sequences of one entry join together, so that their prompt is computed once."""
        self._running: list[_Sequence] = []
        self._ids: set[str] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="helmsman-decode", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return counts as of the last step, and the weight version."""
        return {
            "num_running": len(self._running),
            "num_waiting": sum(map(len, list(self._waiting))),
            "num_prompt_tokens": self._num_prefilled,
            "num_generated_tokens": self._num_generated,
            "version": self.version,
        }

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[GenerationResult]]:
        """Queue requests with the same prompt, all or none; they join once there are slots for all.

        Raises:
            ValueError: An id is already in flight.
            RuntimeError: The engine is asleep or destroyed.
        """
        sequences = [_Sequence(request, self._max_len) for request in requests]
        ids: set[str] = set()
        with self._changed:
            self._check_open()
            if not self.state.has_cache:
                raise RuntimeError(
                    "the rollout engine is asleep and accepts no requests; call wake() first"
                )
            for request in requests:
                if request.request_id in self._ids or request.request_id in ids:
                    raise already_in_flight(request.request_id)
                ids.add(request.request_id)
            self._ids |= ids
            most = self._batch.num_slots
            self._waiting += [
                sequences[start : start + most] for start in range(0, len(sequences), most)
            ]
            self._changed.notify()
        return [sequence.future for sequence in sequences]

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """End requests before the next step; the future has their number."""
        return self._command(
            lambda: self._abort(None if request_ids is None else frozenset(request_ids))
        )

    def update_weights(self, weights: Weights, version: int) -> Future[int]:
        """Load weights before the next step, which waits for them; the future has the version."""
        return self._command(lambda: self._update_weights(weights, version))

    def sleep(self, level: int) -> Future[None]:
        """Release the memory of cache and weights.

        At level 1 the weights are kept on the host, at level 2 they are dropped.
        """
        return self._command(lambda: self._sleep(level))

    def wake(self, weights_only: bool) -> Future[None]:
        return self._command(lambda: self._wake(weights_only))

    def share(self) -> Future[nn.Module]:
        """Return a copy of the model that has the same parameters, and no adapters.

        The future raises ValueError if the model has changed since it was built.
        """
        return self._command(self._share)

    def close(self, timeout_s: float) -> None:
        """End all requests as aborted, and the thread. Idempotent.

        Raises TimeoutError if a running step does not end in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the decoding thread did not end within {timeout_s:g} s; one step is still "
                "running. Restart the worker if it hangs"
            )

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("the rollout engine was destroyed")

    def _command(self, run: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def execute() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(run())
            # The caller gets the error from the future.
            except Exception as exc:  # noqa: BLE001
                future.set_exception(exc)

        with self._changed:
            self._check_open()
            self._commands.append(execute)
            self._changed.notify()
        return future

    # --- the decoding thread ----------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._commands or self._has_work)
                commands, closing = self._commands, self._closing
                self._commands = deque()
            while commands:
                # Keep no reference: a command may hold an update's weights, and so the memory of
                # their sender.
                commands.popleft()()
            if closing:
                self._abort(None)
                self._weight_group.close()
                return
            if not self._has_work:
                continue
            try:
                self._admit()
                self._step()
            except Exception as exc:
                logger.exception("a decoding step failed; failing its requests")
                self._fail(exc)

    @property
    def _has_work(self) -> bool:
        return self.state.is_whole and bool(self._waiting or self._running)

    def _admit(self) -> None:
        """Prefill waiting requests in order of arrival, as slots and the prefill budget allow."""
        joining: list[_Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        with self._changed:
            while self._waiting and len(joining) + len(self._waiting[0]) <= self._batch.num_free:
                prompt = self._waiting[0][0].request.prompt_ids
                prompts.add(tuple(prompt))
                longest = max(longest, len(prompt))
                if joining and longest * len(prompts) > self._max_prefill_tokens:
                    break
                for sequence in self._waiting.popleft():
                    if sequence.future.cancelled():
                        self._ids.discard(sequence.request.request_id)
                    else:
                        joining.append(sequence)
            self._running += joining
        if joining:
            requests = [sequence.request for sequence in joining]
            self._num_prefilled += self._batch.add(
                [request.prompt_ids for request in requests],
                [request.sampling for request in requests],
                [sequence.seed for sequence in joining],
            )

    def _step(self) -> None:
        if not self._running:
            return
        tokens, logprobs = self._batch.step()
        self._num_generated += len(tokens)
        for sequence, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            sequence.add((token,), (logprob,), self.version)
            sequence.settle()
            if sequence.future.cancelled():
                sequence.end("abort")
        self._remove_ended()

    def _remove_ended(self) -> int:
        rows = [
            row for row, sequence in enumerate(self._running) if sequence.stop_reason is not None
        ]
        resolved = [self._running[row] for row in rows]
        for row in reversed(rows):
            # Highest row first, since the last row takes a removed one's place.
            self._batch.remove(row)
            self._running[row] = self._running[-1]
            self._running.pop()
        if resolved:
            self._forget(resolved)
        return len(resolved)

    def _forget(self, sequences: Sequence[_Sequence]) -> None:
        with self._changed:
            self._ids.difference_update(sequence.request.request_id for sequence in sequences)
        for sequence in sequences:
            sequence.resolve()

    def _abort(self, request_ids: frozenset[str] | None) -> int:
        def is_meant(sequence: _Sequence) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        with self._changed:
            dropped = [
                sequence
                for together in self._waiting
                for sequence in together
                if is_meant(sequence)
            ]
            left = (
                [sequence for sequence in together if not is_meant(sequence)]
                for together in self._waiting
            )
            self._waiting = deque(together for together in left if together)
        for sequence in (*dropped, *filter(is_meant, self._running)):
            sequence.end("abort")
        self._forget(dropped)
        return len(dropped) + self._remove_ended()

    def _sleep(self, level: int) -> None:
        check_level(level)
        self._base.require_alone("sleep()")
        with self._changed:
            if self._ids:
                raise RuntimeError(
                    f"{len(self._ids)} request(s) are in flight, so the engine stays awake; wait "
                    "for their end or abort them"
                )
            self._base.change()
            self.state = self.state.after(WeightEvent.SLEPT if level == 1 else WeightEvent.DROPPED)
        if level == 2:
            self._host_swap.drop(self._model.parameters())
        self._host_swap.offload([*self._model.parameters(), *self._model.buffers()])
        self._batch.cache.release()
        current_platform.empty_cache()

    def _wake(self, weights_only: bool) -> None:
        try:
            self._host_swap.restore()
            self.state = self.state.after(WeightEvent.WOKE_WEIGHTS)
            if not weights_only:
                self._batch.cache.allocate()
                self.state = self.state.after(WeightEvent.WOKE)
        except BaseException:
            current_platform.empty_cache()
            raise

    def _share(self) -> nn.Module:
        self._base.require_as_built()  # an earlier command may have changed it
        shared = {id(each): each for each in (*self._model.parameters(), *self._model.buffers())}
        model = copy.deepcopy(self._model, shared)
        detach_all(model)
        return model

    def _update_weights(self, weights: Weights, version: int) -> int:
        if not self.state.has_weight_memory:
            raise RuntimeError(
                "the rollout engine is asleep and has no memory for weights; call "
                "wake(weights_only=True) first"
            )
        try:
            with incoming(weights, self._weight_group) as arriving:
                if is_whole := not is_adapter_in_files(arriving.shapes):
                    self._base.require_alone("a whole model")
                apply_weights(self._model, arriving, is_whole=self.state.is_whole)
                if is_whole:
                    self._base.change()
        except PartialWeightUpdateError:
            self._base.change()
            self.state = self.state.after(WeightEvent.TORN)
            raise
        self.version, self.state = version, self.state.after(WeightEvent.UPDATED)
        return version

    def _fail(self, error: Exception) -> None:
        with self._changed:
            failed = [
                *self._running,
                *(sequence for together in self._waiting for sequence in together),
            ]
            self._running.clear()
            self._waiting.clear()
            self._ids.clear()
        self._batch.clear()
        for sequence in failed:
            sequence.fail(error)
