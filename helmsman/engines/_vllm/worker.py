"""What vLLM's own workers do for us: they take weights, each rank its part of every full tensor.

vLLM mixes VLLMWorkerExtension into its worker class by name (``worker_extension_cls``) and calls it by ``collective_rpc``, on
all ranks at once, between two steps. Arguments and results are of plain types, since vLLM lets no others through.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from helmsman.api.weights import ByCollective, WeightsOnDisk
from helmsman.engines._vllm import versions
from helmsman.engines._vllm.buckets import read_message
from helmsman.engines._vllm.fit import Expected, require_fit
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weight_transfer import incoming
from helmsman.engines.weights import PartialWeightUpdateError

Outcome = dict[str, Any]
"""``error`` (type, message) and whether the weights are ``torn``; empty where all went well."""


class VLLMWorkerExtension:
    """Methods of each of vLLM's workers. Their names must not be those of any of vLLM's worker classes."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    get_model: Callable[[], Any]

    def helmsman_probe(self, path: str) -> Outcome:
        """Whether the memory of the process that sends weights can be opened here."""
        return _outcome(lambda: os.close(os.open(path, os.O_RDONLY)))

    def helmsman_begin(self) -> Outcome:
        """Begin an update; its tensors follow."""
        return _outcome(lambda: _loading_of(self).begin())

    def helmsman_load(self, message: Mapping[str, Any]) -> Outcome:
        """Take a bucket."""
        return _outcome(lambda: _loading_of(self).load(read_message(message).items()))

    def helmsman_end(self) -> Outcome:
        """Every tensor has come: use them."""
        return _outcome(lambda: _loading_of(self).end())

    def helmsman_give_up(self) -> Outcome:
        """No more tensors come: be ready for another update."""
        return _outcome(lambda: _loading_of(self).give_up())

    def helmsman_load_files(self, path: str) -> Outcome:
        """Take all weights from a folder; each rank reads it."""
        return _outcome(lambda: _loading_of(self).read(WeightsOnDisk(path)))

    def helmsman_receive(self, place: Mapping[str, Any], forms: Sequence[Mapping[str, Any]]) -> Outcome:
        """Take all weights from a trainer's broadcasts. The first rank is the member of its group, and sends them on to the
        others of this instance.

        Args:
            place: a ByCollective, as plain types.
            forms: of Expected, as plain types.
        """
        found = msgspec.convert(place, ByCollective), msgspec.convert(forms, list[Expected])
        return _outcome(lambda: _loading_of(self).receive(*found))


class _Loading:
    """The state of updates in one of vLLM's workers."""

    def __init__(self, worker: VLLMWorkerExtension) -> None:
        self._worker = worker
        self._group: WeightGroup | None = None
        self._is_begun = False

    @torch.no_grad()
    def begin(self) -> None:
        if self._is_begun:
            self.give_up()
        with versions.within(self._worker.vllm_config):
            versions.begin_reload(self._worker.get_model())
        self._is_begun = True

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with versions.within(self._worker.vllm_config):
            self._worker.get_model().load_weights(tensors)

    @torch.no_grad()
    def end(self) -> None:
        self._is_begun = False
        with versions.within(self._worker.vllm_config):
            versions.end_reload(self._worker.get_model(), self._worker.model_config)

    def give_up(self) -> None:
        if self._is_begun:
            self.end()  # layers that wait for the rest of their weights must not take it from the next update

    def read(self, weights: WeightsOnDisk) -> None:
        with incoming(weights, WeightGroup(self._worker.device)) as arriving:
            self._take(arriving)

    def receive(self, place: ByCollective, forms: Sequence[Expected]) -> None:
        world = versions.world_group()
        if world.rank_in_group > 0:
            _told(world)  # that they fit, or why nothing comes
            with contextlib.closing(_passed_on(world, self._worker.device)) as buckets:
                self._take(buckets)
            return
        self._group = group = self._group or WeightGroup(self._worker.device)
        sender = _Sender(world)
        try:
            with incoming(place, group) as arriving:
                require_fit(forms, arriving.shapes)
                sender.begin()
                self._take(sender.passing_on(arriving))
        except Exception as error:
            sender.give_up(error)
            raise

    def _take(self, buckets: Iterable[Mapping[str, torch.Tensor]]) -> None:
        try:
            self.begin()
            for bucket in buckets:
                # The buffer is the next bucket's soon, and vLLM keeps what comes of a layer until all of it is there.
                self.load((name, tensor.clone()) for name, tensor in bucket.items())
            self.end()
        except Exception as error:
            self._try_to_give_up()
            raise PartialWeightUpdateError(f"{type(error).__name__}: {error}") from error

    def _try_to_give_up(self) -> None:
        try:
            self.give_up()
        except Exception:  # noqa: BLE001 - the first error counts; the weights are torn in either case
            self._is_begun = False


class _Sender:
    """The first rank's side of passing tensors on within the instance. The others take part until it says that it is over."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._is_over = world.world_size == 1

    def begin(self) -> None:
        """Say that tensors will come."""
        if not self._is_over:
            self._tell({"begins": True})

    def passing_on(self, buckets: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[Mapping[str, torch.Tensor]]:
        """The same buckets, each once the others have it, too."""
        for bucket in buckets:
            if not self._is_over:
                self._tell({"tensors": {name: [tensor.dtype, list(tensor.shape)] for name, tensor in bucket.items()}})
                for tensor in bucket.values():
                    dist.broadcast(tensor.contiguous(), _first(self._world.device_group), group=self._world.device_group)
            yield bucket
        if not self._is_over:
            self._is_over = True
            self._tell({})

    def give_up(self, error: Exception) -> None:
        """Say why no more comes, unless it has been said that it is over."""
        if not self._is_over:
            self._is_over = True
            self._tell({"error": f"{type(error).__name__}: {error}"})

    def _tell(self, message: Mapping[str, Any]) -> None:
        dist.broadcast_object_list([message], _first(self._world.cpu_group), group=self._world.cpu_group)


def _passed_on(world: Any, device: torch.device) -> Generator[Mapping[str, torch.Tensor], None, None]:
    """What the first rank passes on; read to its end also where its reader fails, as the first rank does not know of that."""
    is_over = False
    try:
        while not is_over:
            is_over = True  # unless it says otherwise
            if message := _told(world):
                tensors = _broadcast_into(message, world, device)
                is_over = False
                yield tensors
    finally:
        with contextlib.suppress(ConnectionError):
            while not is_over and (message := _told(world)):
                _broadcast_into(message, world, device)


def _told(world: Any) -> Mapping[str, Any]:
    """What the first rank says. Raises: ConnectionError when it has given up."""
    messages: list[Any] = [None]
    dist.broadcast_object_list(messages, _first(world.cpu_group), group=world.cpu_group)
    message: Mapping[str, Any] = messages[0]
    if "error" in message:
        raise ConnectionError(f"the first rank of this instance gave up: {message['error']}")
    return message


def _broadcast_into(message: Mapping[str, Any], world: Any, device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in message["tensors"].items()}
    for tensor in tensors.values():
        dist.broadcast(tensor, _first(world.device_group), group=world.device_group)
    return tensors


def _first(group: Any) -> int:
    return dist.get_global_rank(group, 0)


def _outcome(work: Callable[[], None]) -> Outcome:
    """An exception would reach our side as text, whose type only vLLM's log has."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the process boundary
        is_torn = isinstance(error, PartialWeightUpdateError)
        cause = error.__cause__ if is_torn and error.__cause__ is not None else error
        return {"error": [type(cause).__name__, str(error)], "torn": is_torn}
    return {}


def _loading_of(worker: VLLMWorkerExtension) -> _Loading:
    # An extension has no constructor of its own, and an attribute of its class would clash with nothing but be shared.
    loading: _Loading | None = worker.__dict__.get("_helmsman_loading")
    if loading is None:
        loading = worker.__dict__["_helmsman_loading"] = _Loading(worker)
    return loading
