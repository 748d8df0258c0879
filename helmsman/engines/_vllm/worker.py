"""The part of a weight update that runs in vLLM's workers: each rank loads its shards.

vLLM mixes VLLMWorkerExtension into its worker class by name (``worker_extension_cls``) and calls it
by ``collective_rpc``, on all ranks at once, between two steps. Arguments and results are plain
types, since vLLM allows no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from helmsman.api.weights import CollectiveTarget, DeviceTarget, WeightsOnDisk
from helmsman.engines._models.adapter_files import is_adapter_in_files, write_received
from helmsman.engines._models.gloo_listeners import close_listeners
from helmsman.engines._vllm import internals
from helmsman.engines._vllm.transfer import read_shared
from helmsman.engines._weights.fit import Expected, require_fit
from helmsman.engines._weights.group import TensorReceiver, WeightGroup
from helmsman.engines._weights.sending import Bucket
from helmsman.engines._weights.shared_memory import DeviceSharingError
from helmsman.engines.weight_transfer import StreamSink, incoming
from helmsman.engines.weights import PartialWeightUpdateError

internals.request_amx()
if internals.is_on_host():
    internals.keep_base_rows()

Outcome = dict[str, Any]
"""``error`` (type, message) and whether the weights are ``torn``; empty on success."""


class VLLMWorkerExtension:
    """Methods added to vLLM's workers; their names must not clash with those of vLLM's classes."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any
    get_model: Callable[[], Any]

    def helmsman_close_listeners(self) -> None:
        """Close the listeners of vLLM's groups, once their ranks are connected."""
        close_listeners()

    def helmsman_begin(self, message: Mapping[str, Any]) -> Outcome:
        """Begin an update; its tensors follow in messages of the same form."""

        def begin() -> None:
            read_shared(message)
            _loading_of(self).begin()

        return _outcome(begin)

    def helmsman_load(self, message: Mapping[str, Any]) -> Outcome:
        return _outcome(lambda: _loading_of(self).load(read_shared(message).items()))

    def helmsman_end(self) -> Outcome:
        """Finish an update, complete or not, and get ready for another one."""
        return _outcome(lambda: _loading_of(self).end())

    def helmsman_load_files(self, path: str) -> Outcome:
        """Load all weights from a folder; each rank reads it."""
        return _outcome(lambda: _loading_of(self).read(WeightsOnDisk(path)))

    def helmsman_forget_adapters(self) -> Outcome:
        """Drop all adapters; sleep at level 2 has left their device memory undefined."""
        return _outcome(self.model_runner.reset_lora_state)

    def helmsman_receive(
        self, place: Mapping[str, Any], forms: Sequence[Mapping[str, Any]], folder: str, policy: str
    ) -> Outcome:
        """Load all weights from a trainer's broadcasts, or from buffers on this rank's device.

        The first rank is a member of the weight-sync group and passes the weights on to the other
        ranks of this instance. With a socket for each rank, each one connects to its own. ``place``
        is a CollectiveTarget or a DeviceTarget and ``forms`` are Expected, as plain types. An
        adapter is written to ``folder`` by the first rank, from where vLLM loads it. Each
        ``policy`` has groups of its own.
        """
        found: CollectiveTarget | DeviceTarget = msgspec.convert(
            place, CollectiveTarget | DeviceTarget
        )
        accepted = msgspec.convert(forms, list[Expected])
        return _outcome(lambda: _loading_of(self, policy).receive(found, accepted, folder))


class _Loading:
    def __init__(self, worker: VLLMWorkerExtension) -> None:
        self._worker = worker
        self._group: WeightGroup | None = None
        self._is_begun = False

    @torch.no_grad()
    def begin(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.end()
        with set_current_vllm_config(self._worker.vllm_config):
            initialize_layerwise_reload(self._worker.get_model())
        self._is_begun = True

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config):
            self._worker.get_model().load_weights(tensors)

    @torch.no_grad()
    def end(self) -> None:
        """Finish an update, even a failed one.

        Otherwise an incomplete layer would take its missing tensors from the next update.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._is_begun:
            return
        self._is_begun = False
        with set_current_vllm_config(self._worker.vllm_config):
            finalize_layerwise_reload(self._worker.get_model(), self._worker.model_config)
            if internals.is_on_host():
                internals.pack_for_host(self._worker.get_model())

    def read(self, weights: WeightsOnDisk) -> None:
        with incoming(weights, WeightGroup(self._worker.device)) as arriving:
            self._take(arriving)  # mapped files: each rank copies its shards to the device

    def receive(
        self, place: CollectiveTarget | DeviceTarget, forms: Sequence[Expected], folder: str
    ) -> None:
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        within = _InstanceGroup(world, self._worker.device)
        is_alone = world.world_size == 1
        if isinstance(place, DeviceTarget) and len(place.sockets) > 1:
            if len(place.sockets) != world.world_size:
                raise DeviceSharingError(
                    f"the instance has {world.world_size} ranks on {len(place.sockets)} devices; "
                    "expected one device per rank"
                )
            place = msgspec.structs.replace(place, sockets=(place.sockets[world.rank_in_group],))
            is_alone = True
        if not is_alone and world.rank_in_group > 0:
            with incoming(place, within) as arriving:
                if is_adapter_in_files(arriving.shapes):
                    _drain(arriving)
                else:
                    self._take(_kept(arriving))
            return
        self._group = group = self._group or WeightGroup(self._worker.device)
        sink = None if is_alone else StreamSink(within)
        try:
            with incoming(place, group) as arriving:
                has_adapter = is_adapter_in_files(arriving.shapes)
                if not has_adapter:
                    require_fit(forms, arriving.shapes)
                if sink is not None:
                    sink.announce(arriving.shapes, arriving.bucket_bytes)
                buckets = _passed_on(arriving, sink)
                if not has_adapter:
                    self._take(_kept(buckets))
                elif world.rank_in_group == 0:
                    write_received(folder, buckets)
                else:
                    _drain(buckets)
        except Exception as error:
            if sink is not None:
                # A RuntimeError, because this instance's own group is not broken.
                sink.give_up(RuntimeError(f"{type(error).__name__}: {error}"))
            raise

    def _take(self, buckets: Iterable[Mapping[str, torch.Tensor]]) -> None:
        try:
            self.begin()
            for bucket in buckets:
                self.load(bucket.items())
            self.end()
        except Exception as error:
            try:
                self.end()
            # The first error is raised; the weights are torn in either case.
            except Exception:  # noqa: BLE001
                self._is_begun = False
            raise PartialWeightUpdateError(f"{type(error).__name__}: {error}") from error


class _InstanceGroup(WeightGroup):
    """The ranks of one vLLM instance as a weight-sync group, on top of vLLM's existing groups."""

    def __init__(self, world: Any, device: torch.device) -> None:
        super().__init__(device)
        self._world = world

    def receiving(self, place: CollectiveTarget | DeviceTarget) -> TensorReceiver:
        return self

    def send(self, num_bytes: int) -> None:
        self.broadcast(self._buffer[:num_bytes])

    def leave(self) -> None:
        return

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(
            tensor,
            dist.get_global_rank(self._world.device_group, 0),
            group=self._world.device_group,
        )

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        sent: list[Any] = [data]
        dist.broadcast_object_list(
            sent, dist.get_global_rank(self._world.cpu_group, 0), group=self._world.cpu_group
        )
        received: bytes = sent[0]
        return received


def _passed_on(
    buckets: Iterable[Mapping[str, torch.Tensor]], sink: StreamSink | None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield each bucket after the other ranks have received it too."""
    for bucket in buckets:
        if sink is not None:
            sink.put(Bucket(bucket, {}))
        yield bucket
    if sink is not None:
        sink.finish()


def _drain(buckets: Iterable[Mapping[str, torch.Tensor]]) -> None:
    for _ in buckets:
        pass


def _kept(
    buckets: Iterable[Mapping[str, torch.Tensor]],
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Copy received buckets, since the next one reuses their memory.

    vLLM keeps tensors until their layer is complete.
    """
    for bucket in buckets:
        yield {name: tensor.clone() for name, tensor in bucket.items()}


def _outcome(work: Callable[[], None]) -> Outcome:
    """Run work and return its error: vLLM would pass on only the text of an exception."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the process boundary
        is_torn = isinstance(error, PartialWeightUpdateError)
        cause = error.__cause__ if is_torn and error.__cause__ is not None else error
        return {"error": [type(cause).__name__, str(error)], "torn": is_torn}
    return {}


def _loading_of(worker: VLLMWorkerExtension, policy: str = "") -> _Loading:
    # An extension has no constructor, and a class attribute would be shared between workers.
    loading: _Loading | None = worker.__dict__.get(f"_helmsman_loading{policy}")
    if loading is None:
        loading = worker.__dict__[f"_helmsman_loading{policy}"] = _Loading(worker)
    return loading
