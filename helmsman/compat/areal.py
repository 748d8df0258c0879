"""AReaL's Scheduler API on Helmsman's schedulers: its classes, signatures, defaults and errors.

A script imports these names in place of AReaL's. It may pass AReaL's own dataclasses, or objects
with their fields. ``scheduler.helmsman`` is the scheduler behind it. An engine with model-parallel
ranks provides their process group as ``context_and_model_parallel_group``. The first rank of that
group broadcasts the arguments of each call to the others, unless ``rpc_meta`` is
``{"broadcast": False}``.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, dataclass_transform

import helmsman
from helmsman.api import errors
from helmsman.api.closing import Closing
from helmsman.api.workers import EngineSpec

log = logging.getLogger(__name__)

# --- jobs and workers -----------------------------------------------------------------------------


@dataclass
class SchedulingSpec:
    """The resources and environment of one worker, with AReaL's defaults.

    ``cmd`` is 'python -m module arguments'. Helmsman's worker replaces AReaL's rpc_server; other
    modules get AReaL's options, such as --port, --role and --worker-index. Commas separate nodes.
    ``mem`` and the fields of containers and Slurm have no effect.
    """

    cpu: float = 8
    gpu: int = 0
    mem: float = 32
    port_count: int = 2
    image: str = ""
    task_type: str = "worker"
    env_vars: dict[str, str] = field(default_factory=dict)
    cmd: str | None = None
    srun_additional_args: str = ""
    additional_bash_cmds: list[str] | None = None
    container_type: str = ""
    mount: str = ""
    nodelist: str | None = None
    exclude: str | None = None
    ray_placement_strategy: str = "shared"


_DEFAULTS = SchedulingSpec()
_NAMES = {  # of AReaL's options that commands get: their place in an experiment, their default
    "experiment_name": ("experiment_name", None),
    "trial_name": ("trial_name", None),
    "name_resolve_type": ("cluster.name_resolve.type", "nfs"),
    "nfs_record_root": ("cluster.name_resolve.nfs_record_root", "/tmp/areal/name_resolve"),
    "etcd3_addr": ("cluster.name_resolve.etcd3_addr", "localhost:2379"),
    "fileroot": ("cluster.fileroot", None),
}
_MAPPED = vars(_DEFAULTS).keys() & {*helmsman.SchedulingSpec.__struct_fields__} - {"mem"}


@dataclass
class SchedulingStrategy:
    """The placement of a job's workers relative to another role."""

    type: str = "separation"
    target: str | None = None
    fork: bool = True
    """With colocation: whether each worker gets a process of its own. True, unlike in Helmsman."""


@dataclass
class Job:
    """One role of the run."""

    role: str
    replicas: int = 0
    tasks: list[SchedulingSpec] = field(default_factory=list)
    """One spec for all replicas, or one for each; the default spec if empty."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)


@dataclass
class Worker:
    """A running worker. ``engine_ports`` is empty, as in AReaL."""

    id: str
    ip: str
    worker_ports: list[str] = field(default_factory=list)
    """Its leased ports, at least two: the first for its ``cmd``, the second as a master port."""
    engine_ports: list[str] = field(default_factory=list)


def _as_job(job: Any, names: Mapping[str, Any]) -> helmsman.Job:
    """Convert a job of AReaL's fields, and log the fields that have no effect."""
    given = getattr(job, "scheduling_strategy", None) or SchedulingStrategy()
    kind = str(getattr(given.type, "value", given.type))  # its enumeration, or a string
    if kind not in ("separation", "colocation"):
        expected = "expected 'separation' or 'colocation'"
        raise ValueError(f"job {job.role!r}: scheduling_strategy.type is {kind!r}; {expected}")
    tasks, colocated = list(job.tasks or ()) or [_DEFAULTS], kind == "colocation"
    names = {"role": job.role, **names}
    ignored = {
        each.name
        for spec in filter(is_dataclass, tasks)
        for each in fields(spec)
        if each.name not in _MAPPED and getattr(spec, each.name) != each.default
    }
    if ignored:
        listed = ", ".join(sorted(ignored))
        log.warning("job %r: these fields of its specs have no effect: %s", job.role, listed)
    return helmsman.Job(
        role=job.role,
        replicas=job.replicas,
        tasks=[_as_spec(spec, names, has_devices=not colocated) for spec in tasks],
        scheduling_strategy=helmsman.SchedulingStrategy(
            type=cast(Any, kind),
            target=given.target if colocated else None,
            fork=colocated and bool(getattr(given, "fork", True)),
        ),
    )


def _as_spec(spec: Any, names: Mapping[str, Any], *, has_devices: bool) -> helmsman.SchedulingSpec:
    value = {name: getattr(spec, name, getattr(_DEFAULTS, name)) for name in _MAPPED}
    value["gpu"] *= has_devices  # a colocated worker has its target's
    value["port_count"] = max(2, value["port_count"])
    value["env_vars"] = {key: str(each) for key, each in (value["env_vars"] or {}).items()}
    value["cmd"] = _as_command(value["cmd"], names)
    for name in ("nodelist", "exclude"):
        value[name] = [each.strip() for each in (value[name] or "").split(",") if each.strip()]
    return helmsman.SchedulingSpec(**value)


def _as_command(cmd: str | None, names: Mapping[str, Any]) -> str | None:
    """Return a module with AReaL's options; None for the server that Helmsman's worker replaces."""
    if not cmd or "areal.infra.rpc.rpc_server" in cmd:
        return None
    program, *rest = cmd.split(maxsplit=2)
    if rest[:1] == ["-m"] and rest[1:] and program.rpartition("/")[2].startswith("python"):
        cmd = rest[1]
    elif program.startswith("python") or "/" in program:
        reason = f"cmd is {cmd!r}; expected 'python -m module arguments'"
        raise WorkerCreationError(names["role"], reason)
    for name, value in {"port": "{port}", "worker_index": "{index}", **names}.items():
        cmd += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
    return cmd


def _names_of(exp_config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take the names of an experiment from its configuration, or from a scheduler's options."""
    given = {name: options.pop(name, default) for name, (_, default) in _NAMES.items()}
    if exp_config is None:
        return given
    return {
        name: functools.reduce(
            lambda at, part: getattr(at, part, None), path.split("."), exp_config
        )
        for name, (path, _) in _NAMES.items()
    }


# --- errors ---------------------------------------------------------------------------------------


@dataclass_transform(eq_default=False)
class SchedulerError(errors.HelmsmanError):
    """Base of AReaL's errors; ``__cause__`` is Helmsman's error."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        named = dict(zip(self.field_names, values, strict=False))
        super().__init__(", ".join(map(str, values[len(named) :])), **named, **fields)


class WorkerCreationError(SchedulerError):
    """Workers that did not start, or an invalid job."""

    worker_key: str
    reason: str
    details: str = ""
    template = "worker {worker_key!r} cannot be created: {reason}{details}"


class WorkerFailedError(SchedulerError):
    """A worker process that has died; a signal is a negative exit code."""

    worker_id: str
    exit_code: int
    stderr: str = ""
    template = "worker {worker_id!r} has exited with code {exit_code}: {stderr}"


class WorkerNotFoundError(SchedulerError):
    """An unknown worker or role."""

    worker_id: str
    template = "no worker or role {worker_id!r}"


class EngineCreationError(SchedulerError):
    """An engine whose constructor raised or took too long, or whose name is in use."""

    worker_id: str
    reason: str
    status_code: int | None = None
    template = "no engine was created on worker {worker_id!r}: {reason}"


class EngineCallError(SchedulerError):
    """A call without a result. It was sent once: ``attempt`` is always 1."""

    worker_id: str
    method: str
    reason: str
    attempt: int = 1
    template = "the call of {method!r} on worker {worker_id!r} failed: {reason}"


class WorkerTimeoutError(SchedulerError):
    """Workers that did not answer in time."""

    worker_key: str
    timeout: float
    template = "worker {worker_key!r} did not answer within {timeout} s"


class EngineImportError(SchedulerError):
    """An engine's import path that the worker cannot resolve."""

    import_path: str
    reason: str
    template = "the engine {import_path!r} cannot be imported: {reason}"


class PortAllocationError(SchedulerError):
    """Never raised, like its other names below: WorkerCreationError or WorkerFailedError is."""


WorkerConfigurationError = GPUAllocationError = RPCConnectionError = PortAllocationError


@contextlib.contextmanager
def _areal_errors(worker: str, method: str = "") -> Iterator[None]:
    """Raise AReaL's errors for Helmsman's; ``worker`` is a worker or a role."""
    try:
        yield
    except errors.WorkerNotFoundError as error:
        raise WorkerNotFoundError(error.name) from error
    except errors.WorkerFailedError as error:
        code = -(error.exit_signal or 1) if error.exit_code is None else error.exit_code
        raise WorkerFailedError(error.worker_id, code, str(error)) from error
    except errors.EngineImportError as error:
        raise EngineImportError(error.engine_path, error.reason) from error
    except (errors.JobError, errors.StartError) as error:
        raise WorkerCreationError(error.role or worker, str(error)) from error
    except (errors.CallError, errors.EngineNotFoundError) as error:
        if method == "__init__":
            raise EngineCreationError(worker, str(error)) from error
        if not method and isinstance(error, errors.EngineCreationError):  # of a task's cmd
            raise WorkerCreationError(worker, str(error)) from error
        if not method and isinstance(error, errors.CallTimeoutError):
            raise WorkerTimeoutError(worker, error.limit_s) from error
        raise EngineCallError(worker, method, str(error)) from error
    except errors.HelmsmanError as error:
        raise SchedulerError(str(error)) from error


# --- schedulers -----------------------------------------------------------------------------------


class Scheduler(Closing):
    """AReaL's Scheduler on one of Helmsman's; its methods raise SchedulerErrors.

    Args:
        scheduler: The scheduler that does the work; it belongs to this one.
        startup_timeout: Limit of ``get_workers`` in seconds.
    """

    _names: Mapping[str, Any] = {}
    _n_gpus_per_node: int | None = None
    _has_explained_retries = False

    def __init__(self, scheduler: helmsman.Scheduler, startup_timeout: float) -> None:
        self.helmsman, self.startup_timeout = scheduler, startup_timeout

    @property
    def n_gpus_per_node(self) -> int:
        """Number of accelerators per node."""
        return self._n_gpus_per_node or self.helmsman.n_gpus_per_node

    def close(self) -> None:
        """End all workers; idempotent. Dropping the last reference has the same effect."""
        self.helmsman.close()

    def create_workers(self, job: Any, *_: Any, **__: Any) -> list[str]:
        """Start a job's workers, all or none, and return their ids; other arguments are ignored."""
        ours = job if isinstance(job, helmsman.Job) else _as_job(job, self._names)
        with _areal_errors(job.role):
            return self.helmsman.create_workers(ours)

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """Return a role's workers in rank order, once each has answered within ``timeout`` s."""
        with _areal_errors(role):
            limit_s = self.startup_timeout if timeout is None else timeout
            found = self.helmsman.get_workers(role, limit_s)
        return [Worker(each.id, each.ip, list(each.engine_ports)) for each in found]

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """End the workers of a role, or of all; an unknown role is logged as a warning."""
        try:
            with _areal_errors(role or ""):
                self.helmsman.delete_workers(role, reverse_order)
        except WorkerNotFoundError as error:
            log.warning("delete_workers(%r) has nothing to delete: %s", role, error.__cause__)

    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        """Start a sibling process for each worker of ``target_role``; return their ids.

        Each runs ``command``, a module, which gets AReaL's options as a task's ``cmd`` does.
        """
        command = _as_command(command, {"role": role, **self._names})
        with _areal_errors(role):
            return self.helmsman.fork_workers(role, target_role, command)

    async def set_worker_env(self, worker_id: str, env: Mapping[str, Any] | None) -> None:
        """Set environment variables in a worker, before its engines are created."""
        texts = {name: str(value) for name, value in (env or {}).items()}
        with _areal_errors(worker_id, "set_worker_env"):
            await self.helmsman.set_worker_env(worker_id, texts)

    async def create_engine(
        self, worker_id: str, engine: Any, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Build an engine, a class or its import path; it has the worker's id as default name."""
        spec = EngineSpec(target=engine, kwargs=kwargs)
        with _areal_errors(worker_id, "__init__"):
            await self.helmsman.create_engine(worker_id, spec, engine_name, *args)

    def call_engine(
        self, worker_id: str, method: str, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of an engine, once, and return its result.

        These named arguments are the call's: ``http_timeout``, its limit in seconds, 7200 by
        default; ``rpc_meta``, options of Helmsman's call_engine such as {"broadcast": False};
        ``max_retries`` and ``retry_delay``, which have no effect. The others are the method's.
        """
        call = self.helmsman.call_engine
        with _areal_errors(worker_id, method):
            return call(worker_id, method, engine_name, *args, **self._options(kwargs))

    async def async_call_engine(
        self, worker_id: str, method: str, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Await call_engine; the arguments and errors are the same."""
        call = self.helmsman.async_call_engine
        with _areal_errors(worker_id, method):
            return await call(worker_id, method, engine_name, *args, **self._options(kwargs))

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the options and the named arguments of a call as Helmsman takes them."""
        meta, limit_s = kwargs.pop("rpc_meta", None) or {}, kwargs.pop("http_timeout", None)
        num_retries, _ = kwargs.pop("max_retries", 1), kwargs.pop("retry_delay", None)
        if num_retries > 1 and not self._has_explained_retries:
            self._has_explained_retries = True
            log.warning(
                "max_retries=%d has no effect: a failed call may have run and is never sent again. "
                "Catch EngineCallError to call the method again.",
                num_retries,
            )
        return {"rpc_meta": {**meta, "kwargs": kwargs}, "rpc_timeout": limit_s}


class LocalScheduler(Scheduler):
    """AReaL's LocalScheduler.

    Args:
        gpu_devices: Only the number counts; CUDA_VISIBLE_DEVICES selects devices. Those found on
            the machine when None.
        log_dir: Folder of the workers' logs; below ``fileroot`` when None, if that is given.
        startup_timeout: Limit in seconds for starting workers, and for ``get_workers``.
        health_check_interval: No effect.
        exp_config: Experiment whose names and ``cluster.fileroot`` are used.
        **options: AReaL's experiment_name, trial_name and fileroot; its options of name resolution,
            for commands; enable_tms_offload, without effect; those of Helmsman's LocalScheduler.
    """

    def __init__(
        self,
        gpu_devices: Sequence[int] | None = None,
        log_dir: str | Path | None = None,
        startup_timeout: float = 300.0,
        health_check_interval: float = 1.0,
        *,
        exp_config: Any = None,
        **options: Any,
    ) -> None:
        self._names = _names_of(exp_config, options)
        options.pop("enable_tms_offload", None)
        root, *names = (self._names[n] for n in ("fileroot", "experiment_name", "trial_name"))
        if log_dir is None and root and all(names):
            log_dir = Path(root, "logs", getpass.getuser(), *names)
        if gpu_devices is not None:
            options.setdefault("num_gpus", len(gpu_devices))
        # CPUs are shared: a spec's number sets thread counts and may exceed the machine's.
        options.setdefault("num_cpus", 4096)
        options.setdefault("timeouts", helmsman.Timeouts(start_s=startup_timeout))
        super().__init__(helmsman.LocalScheduler(log_dir=log_dir, **options), startup_timeout)


class RayScheduler(Scheduler):
    """AReaL's RayScheduler.

    Args:
        startup_timeout: Limit in seconds for starting workers, and for ``get_workers``.
        exp_config: Experiment whose ``cluster.n_gpus_per_node`` is used.
        n_gpus_per_node: Number of accelerators per node; the observed number when None.
        **options: Arguments of Helmsman's RayScheduler.
    """

    def __init__(
        self,
        startup_timeout: float = 300.0,
        *,
        exp_config: Any = None,
        n_gpus_per_node: int | None = None,
        **options: Any,
    ) -> None:
        self._names = _names_of(exp_config, options)
        if exp_config is not None:
            n_gpus_per_node = exp_config.cluster.n_gpus_per_node
        self._n_gpus_per_node = n_gpus_per_node
        options.setdefault("timeouts", helmsman.Timeouts(start_s=startup_timeout))
        super().__init__(helmsman.RayScheduler(**options), startup_timeout)
