"""The caller's view of a worker group: methods that run on its ranks, and futures of results."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, cast, overload

import msgspec

from helmsman.api.device_mapping import parse_device_mapping
from helmsman.api.dispatch import MethodSpec
from helmsman.api.errors import InvalidSpecError
from helmsman.api.plain import make_plain
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
    """Device numbers of the ResourceManager, as a list, '0-7,16' or 'list(range(0,8))'; assigned to
    ranks in this order. None: workers without devices, whose ranks take turns on the nodes.
    """
    num_gpus_per_worker: int = 1
    """Devices per worker, if there is a device_mapping. A worker runs on the node of its first
    device and sees those of that node; for devices of other nodes it starts actors of its own in
    their placement groups.
    """
    world_size: int | None = None
    """Number of workers; derived from the device_mapping if there is one."""
    num_cpus: float = 1
    """CPUs per worker, which also set thread counts. Workers without devices request them from the
    cluster.
    """
    mem: float = 0
    """Memory per worker without devices, in GB (10^9 bytes)."""
    env_vars: dict[str, str] = {}
    """Environment variables of the workers."""
    max_concurrency: int | None = None
    """Maximum number of the group's calls in flight; further calls wait in the script, in order.
    None: no limit.
    """
    dp_size: int | None = None
    """Data-parallel ranks; None: derived from the other sizes."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    pp_size: int = 1
    """Pipeline stages."""
    cp_size: int = 1
    """Context-parallel ranks."""
    vp_size: int = 1
    """Virtual pipeline stages of each rank, for the workers' own use."""
    mesh: Sequence[Axis] = DEFAULT_MESH
    """The axes, outermost first."""

    def __post_init__(self) -> None:
        """Convert the fields to plain Python."""
        make_plain(self)

    def num_workers(self, name: str = "cluster") -> int:
        """Return the number of workers.

        Args:
            name: Name of the cluster, for errors.

        Raises:
            InvalidSpecError: The fields do not give one number.
        """

        def require(holds: bool, field: str, expected: str) -> None:
            if not holds:
                value = getattr(self, field)
                raise InvalidSpecError(role=name, field=field, value=value, expected=expected)

        limit, size, each = self.max_concurrency, self.world_size, self.num_gpus_per_worker
        require(limit is None or limit >= 1, "max_concurrency", "1 or more, or None for no limit")
        if self.device_mapping is None:
            expected = "a number of workers, or a device_mapping that gives it"
            require(size is not None, "world_size", expected)
            return cast(int, size)
        devices = len(parse_device_mapping(self.device_mapping, name))
        expected = f"a divisor of the {devices} devices of device_mapping"
        require(each >= 1 and not devices % each, "num_gpus_per_worker", expected)
        expected = f"{devices // each} ({devices} devices, {each} for each worker), or None"
        require(size in (None, devices // each), "world_size", expected)
        return devices // each

    def topology(self, name: str = "cluster") -> Topology:
        """Compute the coordinates of the ranks, also before any worker starts.

        Args:
            name: Name of the cluster, for errors.

        Returns:
            The topology: ``dp_size`` and the other sizes, and ``get_rank_info(rank)``.

        Raises:
            InvalidSpecError: The sizes do not multiply to the number of workers.
        """
        world_size = self.num_workers(name)
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
    """The pending result of a group call.

    ``result()`` blocks; ``await`` works on any event loop. Iterating over it yields a future for
    each rank whose result the call returns, in the same order. Each is done as soon as its rank is,
    and raises that rank's error: ``await asyncio.gather(*group.execute_all_async("step"))``.

    The call continues even if no caller waits for it. The first request for the result combines the
    ranks' results, once.

    Args:
        results: The ranks' results, in rank order.
        collect: Combines the ranks' results.
        forbid_blocking: Raises in a thread that must not wait for the results.
        make_parts: Makes the futures of the single ranks.
    """

    def __init__(
        self,
        results: concurrent.futures.Future[Any],
        collect: Callable[[Any], Any],
        forbid_blocking: Callable[[], None] = lambda: None,
        make_parts: Callable[[], Sequence[concurrent.futures.Future[Any]]] = tuple,
    ) -> None:
        self._results = results
        self._collect = collect
        self._forbid_blocking = forbid_blocking
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None
        self._make_parts = make_parts
        self._parts: list[GroupFuture[Any]] | None = None

    def __iter__(self) -> Iterator[GroupFuture[Any]]:
        with self._lock:
            if self._parts is None:
                self._parts = [
                    GroupFuture(part, lambda result: result, self._forbid_blocking)
                    for part in self._make_parts()
                ]
        return iter(self._parts)

    def done(self) -> bool:
        """Return whether all ranks have answered, or the call has failed."""
        return self._results.done()

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result of the call.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the call continues.
            RuntimeError: The wait would block Helmsman's event loop.
            HelmsmanError: The error of the call.
        """
        if not self._results.done():
            self._forbid_blocking()
        return self._collected(self._results.result(timeout))

    def awaited(self) -> T_co:
        """Wait for the result as the only waiter: interrupting the wait cancels the future."""
        try:
            return self.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its exception, or None.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the call continues.
        """
        try:
            self.result(timeout)
        except Exception as error:  # The call's error; an interrupt of the wait passes through.
            if isinstance(error, concurrent.futures.TimeoutError) and not self._results.done():
                raise
            return error
        return None

    def cancel(self) -> None:
        """Stop waiting. Running calls continue in the workers, and their outcomes are logged."""
        self._results.cancel()

    def add_done_callback(self, function: Callable[[Self], Any]) -> None:
        """Call ``function(future)`` when done, on Helmsman's event loop; it must not block."""
        self._results.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, T_co]:
        # Shielded: cancelling one of several awaits must not cancel the others.
        results = yield from asyncio.shield(asyncio.wrap_future(self._results)).__await__()
        return self._collected(results)

    def _collected(self, results: Any) -> T_co:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = self._collect(results), None
                # Kept, so that every waiter gets the same error.
                except Exception as error:  # noqa: BLE001
                    self._outcome = None, error
        value, failure = self._outcome
        if failure is not None:
            raise failure
        collected: Any = value  # A T_co by the method's declaration.
        return collected  # type: ignore[no-any-return]


class Options(msgspec.Struct, frozen=True):
    """Options of one call."""

    timeout: float | None = None
    """Limit in seconds for all ranks together; the scheduler's ``timeouts.call_s`` if None."""
    keep: bool = False
    """Whether to leave the results in the workers."""


class GroupMethod(Generic[P, G]):
    """A method of a worker group.

    Calling it runs it on the ranks and returns the declared result.

    Args:
        group: The worker group.
        spec: Declaration of the method.
        options: Options of its calls.
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
        """Return the same method with other call options.

        Args:
            timeout: Limit in seconds for all ranks together; ``timeouts.call_s`` if None.
            keep: Whether to leave the results in the workers; see ``keep``.

        Returns:
            The method with these options.
        """
        return GroupMethod(self._group, self.spec, Options(timeout, keep))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> G:
        """Run the method and wait for the result.

        Raises:
            DispatchError: The arguments do not fit the declaration. Nothing is sent.
            UnevenBatchError: Rows do not divide over the ranks. Nothing is sent.
            GroupCallError: Some ranks failed. A group of one rank raises that rank's error itself.
        """
        return self.submit(*args, **kwargs).awaited()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> GroupFuture[G]:
        """Start the method and return a future at once; takes the arguments of the method.

        A failed check of the ranks' coordinates is raised by the future. Tensor arguments must not
        be written to before the future is done. Calls reach each worker in the order of submission.

        Returns:
            A future of the declared result.

        Raises:
            DispatchError: The arguments do not fit the declaration. Nothing is sent.
            UnevenBatchError: Rows do not divide over the ranks. Nothing is sent.
            ArgumentNotSerializableError: An argument cannot be pickled. Nothing is sent.
        """
        return self._group._begin(self.spec, args, kwargs, self._options)

    @overload
    def keep(self: GroupMethod[P, Batch], *args: P.args, **kwargs: P.kwargs) -> RemoteBatch: ...
    @overload
    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the method and wait, but leave the results in the workers.

        ``options(keep=True).submit`` does not wait.

        Returns:
            A RemoteBatch where batches are joined, whose rows stay in the workers until they are
            read. Otherwise the call's usual result, with a ResultHandle in place of each result
            that is not None.
        """
        options = msgspec.structs.replace(self._options, keep=True)
        return self._group._begin(self.spec, args, kwargs, options).awaited()

    def __repr__(self) -> str:
        return f"<{self.spec.full_name} of {self._group!r}>"


class WorkerGroup(ParallelSizes, abc.ABC, Generic[W_co]):
    """Ranks that are called together; each holds an instance of the class ``W_co``."""

    topology: Topology

    @property
    def sizes(self) -> Mapping[Axis, int]:  # type: ignore[override]
        """Number of ranks along each axis."""
        return self.topology.sizes

    def method(self, method: RegisteredMethod[W_co, P, Any, G]) -> GroupMethod[P, G]:
        """Bind a declared method to this group: ``group.method(Actor.log_probs)(batch)``.

        Raises:
            TypeError: ``method`` is not declared by ``register``.
        """
        if not isinstance(getattr(method, "spec", None), msgspec.Struct):
            raise TypeError(
                f"method is {method!r}; expected a method declared by register, such as "
                "Actor.log_probs. Declare it with @register(...) as its outermost decorator, or "
                "call it by name: execute_all_sync('name', ...)"
            )
        return GroupMethod(self, method.spec)

    @abc.abstractmethod
    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> GroupFuture[Any]:
        """Dispatch a call."""


class RegisteredMethod(Generic[W_contra, P, R, G]):
    """A declared method: an ordinary method of a worker, and a group call on a worker group.

    On the class itself it is the declaration, to pass to ``WorkerGroup.method`` or to name in a
    group's class::

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
            # The first class that holds it declares it; a group's class only refers to it.
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
        """Call the function itself; serves ``super().method(...)`` and ``Class.method(worker)``."""
        result: R = self.function(worker, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<{self.spec.full_name}, {self.spec.mode_shown}>"


class GroupWorker:
    """Optional base class of a group's workers that provides ``rank_info``.

    It is set before the constructor runs, or right after it if a metaclass creates instances in its
    own way.
    """

    rank_info: RankInfo
    """The rank's coordinates, as the controller computed them."""
