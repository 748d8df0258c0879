"""What a group of workers is to those who call it: methods that run on its ranks, and futures of
what they return.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, overload

import msgspec

from helmsman.api.dispatch import MethodSpec
from helmsman.api.errors import InvalidSpecError
from helmsman.api.suggestions import Suggesting
from helmsman.api.topology import DEFAULT_MESH, Axis, ParallelSizes, RankInfo, Topology

if TYPE_CHECKING:
    from helmsman.api.batch import Batch
    from helmsman.api.remote_batch import RemoteBatch

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)
G = TypeVar("G")
T_co = TypeVar("T_co", covariant=True)


class ClusterConfig(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Size, devices and parallelism of a group's workers."""

    device_mapping: str | Sequence[int] | None = None
    """Devices of the ResourceManager by number, a list or '0-7,16'; ranks get them in this order.
    None: workers without devices, spread over the nodes."""
    num_gpus_per_worker: int = 1
    """Devices of each worker, where there is a device_mapping."""
    world_size: int | None = None
    """Number of workers; with a device_mapping what that gives."""
    num_cpus: float = 1
    """CPUs of each worker, from which thread counts follow. Workers without devices ask the cluster
    for them.
    """
    mem: float = 0
    """Memory of each worker without devices in GB (10^9 bytes)."""
    env_vars: dict[str, str] = {}
    """Environment variables of the workers."""
    max_concurrency: int | None = None
    """Calls of the group that may be in flight at once; further ones wait in the script, in their
    order. None: no limit.
    """
    dp_size: int | None = None
    """Data-parallel ranks; what the other sizes leave when None."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    pp_size: int = 1
    """Pipeline stages."""
    cp_size: int = 1
    """Context-parallel ranks."""
    mesh: Sequence[Axis] = DEFAULT_MESH
    """The axes, outermost first."""

    def topology(self, name: str, world_size: int) -> Topology:
        """The coordinates of so many ranks. Raises: InvalidSpecError, for the cluster called
        ``name``.
        """
        try:
            return Topology.of(
                world_size,
                dp=self.dp_size,
                tp=self.tp_size,
                pp=self.pp_size,
                cp=self.cp_size,
                mesh=self.mesh,
            )
        except ValueError as error:
            sizes = f"dp {self.dp_size}, tp {self.tp_size}, pp {self.pp_size}, cp {self.cp_size}"
            raise InvalidSpecError(
                role=name,
                field="worker_config sizes",
                value=sizes,
                expected=f"sizes that make up the group: {error}",
            ) from error


class GroupFuture(Generic[T_co]):
    """The result of a call on a group that has begun. ``result()`` blocks for it; ``await`` waits
    on any event loop.

    The call goes on when nobody waits for it any more. What the ranks return is put together by
    whoever first asks, once.
    """

    def __init__(
        self,
        results: concurrent.futures.Future[list[Any]],
        collect: Callable[[list[Any]], Any],
        forbid_blocking: Callable[[], None] = lambda: None,
    ) -> None:
        """Made by the group; ``forbid_blocking`` raises in a thread that must not wait for the
        results.
        """
        self._results = results
        self._collect = collect
        self._forbid_blocking = forbid_blocking
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None

    def done(self) -> bool:
        """Whether all ranks have answered, or the call has failed."""
        return self._results.done()

    def result(self, timeout: float | None = None) -> T_co:
        """What the call returns. Raises: what it raised; TimeoutError after ``timeout`` seconds of
        waiting, and it goes on; RuntimeError on Helmsman's event loop, for what is not done.
        """
        if not self._results.done():
            self._forbid_blocking()
        return self._collected(self._results.result(timeout))

    def awaited(self) -> T_co:
        """As ``result``, for somebody who is the only one to wait: an interrupt of the wait cancels
        it.
        """
        try:
            return self.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None."""
        try:
            self.result(timeout)
        except Exception as error:  # it is what is asked for; an interrupt of the wait is not
            if isinstance(error, concurrent.futures.TimeoutError) and not self._results.done():
                raise
            return error
        return None

    def cancel(self) -> None:
        """Wait for it no longer; what has begun goes on in the workers, and how it ends is
        logged.
        """
        self._results.cancel()

    def add_done_callback(self, function: Callable[[Self], Any]) -> None:
        """Call ``function(future)`` once it is done, on Helmsman's event loop, where it must not
        block.
        """
        self._results.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, T_co]:
        # Shielded: one of several who await must not cancel it for the others.
        results = yield from asyncio.shield(asyncio.wrap_future(self._results)).__await__()
        return self._collected(results)

    def _collected(self, results: list[Any]) -> T_co:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = self._collect(results), None
                # Kept, so that everybody who waits gets the same
                except Exception as error:  # noqa: BLE001
                    self._outcome = None, error
        value, failure = self._outcome
        if failure is not None:
            raise failure
        collected: Any = value  # which the method's declaration says is a T_co
        return collected  # type: ignore[no-any-return]


class Options(msgspec.Struct, frozen=True):
    """How one call is made."""

    timeout: float | None = None
    """Seconds for all ranks together; the scheduler's ``timeouts.call_s`` when None."""
    keep: bool = False
    """Leave the results in the workers."""


class GroupMethod(Generic[P, G]):
    """A method of a worker group. Calling it runs it on the ranks and returns what its declaration
    says.
    """

    def __init__(
        self,
        group: WorkerGroup[Any],
        spec: MethodSpec,
        options: Options = Options(),  # noqa: B008 - frozen
    ) -> None:
        self.spec = spec
        self._group = group
        self._options = options

    @overload
    def options(
        self: GroupMethod[P, Batch], *, timeout: float | None = ..., keep: Literal[True]
    ) -> GroupMethod[P, RemoteBatch]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., keep: Literal[True]
    ) -> GroupMethod[P, Any]: ...
    @overload
    def options(
        self, *, timeout: float | None = ..., keep: Literal[False] = ...
    ) -> GroupMethod[P, G]: ...
    def options(self, *, timeout: float | None = None, keep: bool = False) -> GroupMethod[P, Any]:
        """The same method with a limit in seconds for all ranks together, or with results that
        stay; see ``keep``.
        """
        return GroupMethod(self._group, self.spec, Options(timeout, keep))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> G:
        """Run it and wait.

        Raises: DispatchError and UnevenBatchError before anything is sent; the error of the first
        rank that failed (GroupCallError, with the others counted, where the group has several
        ranks).
        """
        return self.submit(*args, **kwargs).awaited()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> GroupFuture[G]:
        """Run it and return a future at once; a failing check of the ranks' coordinates comes out
        of the future, too.

        Tensors among the arguments must not be written to before it is done. Calls reach each
        worker in the order in which they were submitted.

        Raises: DispatchError, UnevenBatchError and ArgumentNotSerializableError, before anything is
            sent.
        """
        return self._group._begin(self.spec, args, kwargs, self._options)

    @overload
    def keep(self: GroupMethod[P, Batch], *args: P.args, **kwargs: P.kwargs) -> RemoteBatch: ...
    @overload
    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run it and wait, but leave the results where they are; ``options(keep=True).submit`` does
        not wait.

        Returns: a Batch whose rows stay in the workers until somebody looks at them, where batches
        are joined; otherwise what the call itself returns, with a ResultHandle in place of each
        result that is not None.
        """
        options = msgspec.structs.replace(self._options, keep=True)
        return self._group._begin(self.spec, args, kwargs, options).awaited()

    def __repr__(self) -> str:
        return f"<{self.spec.full_name} of {self._group!r}>"


class WorkerGroup(ParallelSizes, abc.ABC, Generic[W_co]):
    """Ranks that are called together; ``W_co`` is the class of which each has an instance."""

    topology: Topology

    @property
    def sizes(self) -> Mapping[Axis, int]:  # type: ignore[override]
        """Ranks along each axis."""
        return self.topology.sizes

    def method(self, method: RegisteredMethod[W_co, P, Any, G]) -> GroupMethod[P, G]:
        """A declared method, to be called on this group: ``group.method(Actor.log_probs)(batch)``.

        Raises: TypeError for what is not declared.
        """
        if not isinstance(getattr(method, "spec", None), msgspec.Struct):
            raise TypeError(
                "method takes what register has declared, such as Actor.log_probs; got "
                f"{method!r}. Declare it with "
                "@register(...) as its outermost decorator, or call it by name: "
                "execute_all_sync('name', ...)"
            )
        return GroupMethod(self, method.spec)

    @abc.abstractmethod
    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> GroupFuture[Any]:
        """Dispatch a call."""


class RegisteredMethod(Generic[W_contra, P, R, G]):
    """A declared method: of a worker an ordinary method; of a worker group, one that is called on
    its ranks.

    On the class itself it is the declaration, to be given to ``WorkerGroup.method``, or to be named
    in a group's class::

        class ActorGroup(Cluster[Actor]):
            log_probs = Actor.log_probs
    """

    def __init__(self, function: Callable[..., Any], spec: MethodSpec) -> None:
        self.function = function
        self.spec = spec
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__wrapped__ = function

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.spec.owner:
            # the first class that has it declares it; a group's class only names it
            self.spec = msgspec.structs.replace(self.spec, name=name, owner=owner.__qualname__)

    @overload
    def __get__(self, instance: None, owner: type) -> RegisteredMethod[W_contra, P, R, G]: ...
    @overload
    def __get__(self, instance: WorkerGroup[W_contra], owner: type) -> GroupMethod[P, G]: ...
    @overload
    def __get__(self, instance: W_contra, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, WorkerGroup):
            return GroupMethod(instance, self.spec)
        return self.function.__get__(instance, owner)

    def __call__(self, worker: W_contra, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method itself, as ``super().method(...)`` and ``Class.method(worker, ...)``
        do.
        """
        result: R = self.function(worker, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<{self.spec.full_name}, {self.spec.mode_shown}>"


class GroupWorker:
    """Optional base of a group's workers: it knows its place before its constructor runs, or right
    after it where a metaclass makes instances in a way of its own.
    """

    rank_info: RankInfo
    """What the controller has computed."""
