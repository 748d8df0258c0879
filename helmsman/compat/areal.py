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
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, cast, dataclass_transform

import helmsman
from helmsman.api import errors
from helmsman.api.closing import Closing
from helmsman.api.workers import EngineSpec

log = logging.getLogger(__name__)

# --- jobs and workers -----------------------------------------------------------------------------


@dataclass
class SchedulingSpec:
    """The resources and environment of one worker, with AReaL's fields and defaults.

    A ``cmd`` is a program and its arguments, and gets AReaL's options, such as --port, --role and
    --worker-index; Helmsman's worker replaces AReaL's rpc_server. RayScheduler alone reserves
    ``mem``, in GiB. Commas separate nodes. Fields of containers and of Slurm are refused unless
    they have their defaults or are empty.
    """

    cpu: float = 8
    gpu: int = 0
    mem: float = 32
    port_count: int = 2
    image: str = "/storage/openpsi/images/areal-latest.sif"
    task_type: str = "worker"
    env_vars: dict[str, str] = field(default_factory=dict)
    cmd: str | None = None
    srun_additional_args: str = "--unbuffered --mpi=pmi2 -K --chdir $PWD"
    additional_bash_cmds: list[str] | None = None
    container_type: str = "apptainer"
    mount: str = "/storage:/storage"
    nodelist: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    exclude: str | None = None
    ray_placement_strategy: str | None = None


_DEFAULTS = SchedulingSpec()
_CONTAINER = "Start the script, or the nodes of its Ray, in that container"
_SLURM = "Give it to the sbatch or srun that starts the nodes"
_REFUSED = {  # the fields without a counterpart: the next step
    "image": _CONTAINER,
    "container_type": _CONTAINER,
    "mount": _CONTAINER,
    "srun_additional_args": _SLURM,
    "reservation": _SLURM,
    "exclusive": _SLURM,
    "additional_bash_cmds": "Run them on the nodes before the script, or use env_vars",
}
_NAMES = {  # of AReaL's options that commands get: their place in an experiment, their default
    "experiment_name": ("experiment_name", None),
    "trial_name": ("trial_name", None),
    "name_resolve_type": ("cluster.name_resolve.type", "nfs"),
    "nfs_record_root": ("cluster.name_resolve.nfs_record_root", "/tmp/areal/name_resolve"),
    "etcd3_addr": ("cluster.name_resolve.etcd3_addr", "localhost:2379"),
    "fileroot": ("cluster.fileroot", None),
}
_MAPPED = vars(_DEFAULTS).keys() & {*helmsman.SchedulingSpec.__struct_fields__}
_GIB = 1.073741824  # in GB
_PROGRAM = "helmsman.compat._program"
_RPC_SERVER = re.compile(r"areal(\.\w+)*\.rpc_server")


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
    """Its leased ports, ``port_count`` of them: the first for its ``cmd``."""
    engine_ports: list[str] = field(default_factory=list)


def _as_job(job: Any, names: Mapping[str, Any], *, reserves_memory: bool) -> helmsman.Job:
    """Convert a job of AReaL's fields; a WorkerCreationError lists those that cannot be kept."""
    given = getattr(job, "scheduling_strategy", None) or SchedulingStrategy()
    kind = str(getattr(given.type, "value", given.type))  # its enumeration, or a string
    if kind not in ("separation", "colocation"):
        expected = "expected 'separation' or 'colocation'"
        raise ValueError(f"job {job.role!r}: scheduling_strategy.type is {kind!r}; {expected}")
    tasks, colocated = list(job.tasks or ()) or [_DEFAULTS], kind == "colocation"
    names = {"role": job.role, **names}
    if refused := {line for spec in tasks for line in _refusals(spec)}:
        raise WorkerCreationError(job.role, " ".join(sorted(refused)))
    own = {"gpu": not colocated, "mem": reserves_memory and not colocated}
    return helmsman.Job(
        role=job.role,
        replicas=job.replicas,
        tasks=[_as_spec(spec, names, own) for spec in tasks],
        scheduling_strategy=helmsman.SchedulingStrategy(
            type=cast(Any, kind),
            target=given.target if colocated else None,
            fork=colocated and bool(getattr(given, "fork", True)),
        ),
    )


def _entries(spec: Any) -> dict[str, Any]:
    """Return the fields of a spec, an object or a mapping such as OmegaConf's; unknown ones too."""
    if isinstance(spec, Mapping):
        return dict(spec)
    known = {name: getattr(spec, name) for name in vars(_DEFAULTS) if hasattr(spec, name)}
    return known | getattr(spec, "__dict__", {})


def _refusals(spec: Any) -> Iterator[str]:
    """Yield a sentence for each field whose value has no counterpart."""
    theirs = {each.name: each.default for each in fields(spec)} if is_dataclass(spec) else {}
    for name, value in _entries(spec).items():
        usual, expected = getattr(_DEFAULTS, name, None), ""
        if name in _REFUSED:
            if value and value not in (usual, theirs.get(name), "none"):  # "none": no container
                expected = f"{usual!r}. {_REFUSED[name]}; then leave it out."
        elif name == "task_type":
            if value not in ("worker", "engine"):
                expected = "'worker' or 'engine'. Leave it out."
        elif name in ("nodelist", "exclude"):
            if "[" in (value or ""):
                expected = "names with commas. Write the name of each node."
        elif name not in _MAPPED and value and value != theirs.get(name):
            expected = f"a known field: {', '.join(vars(_DEFAULTS))}. Leave it out."
        if expected:
            yield f"{name} is {value!r}, expected {expected}"


def _as_spec(
    spec: Any, names: Mapping[str, Any], own: Mapping[str, bool]
) -> helmsman.SchedulingSpec:
    """Convert a spec; a colocated worker has the devices and the memory of its target."""
    value = {**vars(_DEFAULTS), **_entries(spec)}
    value = {name: value[name] for name in _MAPPED}
    value["gpu"] *= own["gpu"]
    value["mem"] *= own["mem"] * _GIB
    value["port_count"] = max(1, value["port_count"])
    value["env_vars"] = {key: str(each) for key, each in (value["env_vars"] or {}).items()}
    value["cmd"] = _as_command(value["cmd"], names)
    value["ray_placement_strategy"] = value["ray_placement_strategy"] or "shared"
    for name in ("nodelist", "exclude"):
        value[name] = [each.strip() for each in (value[name] or "").split(",") if each.strip()]
    return helmsman.SchedulingSpec(**value)


def _as_command(cmd: str | None, names: Mapping[str, Any]) -> str | None:
    """Return the module that runs a program, with AReaL's options; None for AReaL's rpc_server."""

    def refuse(expected: str) -> NoReturn:
        raise WorkerCreationError(names["role"], f"cmd is {cmd!r}, expected {expected}")

    if not isinstance(cmd, str | None):
        refuse("one string. Join its words by shlex.join.")
    try:
        words = shlex.split(cmd or "")
    except ValueError as error:
        refuse(f"words quoted as for a shell: {error}. Close the quotation.")
    if not words:
        return None
    if any(word == "--port" or word.startswith("--port=") for word in words):
        refuse("no --port. Leave it out: the worker's first port is appended.")
    program, *rest = words
    is_python = program.startswith("python") or program == sys.executable
    is_module = is_python and rest[:1] == ["-m"] and len(rest) > 1
    if any(map(_RPC_SERVER.fullmatch, words)):
        if not is_module or rest[2:]:
            refuse("'python -m areal.infra.rpc.rpc_server': Helmsman's worker runs in its place.")
        return None
    return _with_options(shlex.join(rest[1:] if is_module else [_PROGRAM, *words]), names)


def _with_options(module: str, names: Mapping[str, Any]) -> str:
    """Append the options of AReaL's commands, with Helmsman's placeholders."""
    for name, value in {"port": "{port}", "worker_index": "{index}", **names}.items():
        module += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
    return module


def _take_names(exp_config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take AReaL's options of its commands from an experiment, or from a scheduler's options.

    Options without effect are removed as well.
    """
    options.pop("health_check_interval", None)
    if options.pop("enable_tms_offload", None):
        log.warning("enable_tms_offload has no effect: set LD_PRELOAD in env_vars instead.")
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
    _reserves_memory = False
    _n_gpus_per_node: int | None = None
    _has_explained_retries = False

    def __init__(self, scheduler: helmsman.Scheduler, startup_timeout: float) -> None:
        self.helmsman, self.startup_timeout = scheduler, startup_timeout
        self._commands: dict[str, str | None] = {}

    @property
    def n_gpus_per_node(self) -> int:
        """Number of accelerators per node."""
        return self._n_gpus_per_node or self.helmsman.n_gpus_per_node

    def close(self) -> None:
        """End all workers; idempotent. Dropping the last reference has the same effect."""
        self.helmsman.close()

    def create_workers(self, job: Any, *_: Any, **__: Any) -> list[str]:
        """Start a job's workers, all or none, and return their ids; other arguments are ignored."""
        is_ours = isinstance(job, helmsman.Job)
        ours = job if is_ours else _as_job(job, self._names, reserves_memory=self._reserves_memory)
        with _areal_errors(job.role):
            created = self.helmsman.create_workers(ours)
        if ours.scheduling_strategy.type == "separation" or ours.scheduling_strategy.fork:
            for rank, worker_id in enumerate(created):
                self._commands[worker_id] = None if is_ours else ours.spec(rank).cmd
        return created

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """Return a role's workers in rank order, once each has answered within ``timeout`` s.

        The address of a worker with a ``cmd`` is one at which its first port accepts connections.
        """
        with _areal_errors(role):
            limit_s = self.startup_timeout if timeout is None else timeout
            found = self.helmsman.get_workers(role, limit_s)
            programs = {
                each.id: self.helmsman.call_engine(each.id, "endpoint", "command")
                for each in found
                if self._commands.get(each.id)
            }
        for worker_id, (_, exit_code) in programs.items():
            if exit_code is not None:
                reason = f"its cmd {self._commands[worker_id]!r} has ended. Its log has the output."
                raise WorkerFailedError(worker_id, exit_code, reason)
        return [
            Worker(each.id, programs.get(each.id, (each.ip,))[0], list(each.engine_ports))
            for each in found
        ]

    def _require_engines(self, worker_id: str, route: str) -> None:
        """Refuse a request that AReaL would send to the program of a worker's ``cmd``."""
        if command := self._commands.get(worker_id):
            raise EngineCreationError(
                worker_id,
                f"it runs {command!r}, expected a worker without a cmd. Leave the cmd out, or post "
                f"the request to {route} at the worker's ip and first port.",
            )

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """End the workers of a role, or of all; an unknown role is logged as a warning."""
        try:
            with _areal_errors(role or ""):
                self.helmsman.delete_workers(role, reverse_order)
            for worker_id in list(self._commands):
                if role in (None, worker_id.rpartition("/")[0]):
                    del self._commands[worker_id]
        except WorkerNotFoundError as error:
            log.warning("delete_workers(%r) has nothing to delete: %s", role, error.__cause__)

    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        """Start a sibling process for each worker of ``target_role``; return their ids.

        Each runs ``command``, a module, which gets AReaL's options as a task's ``cmd`` does.
        """
        ours = None
        if command and not _RPC_SERVER.fullmatch(command):
            ours = _with_options(command, {"role": role, **self._names})
        with _areal_errors(role):
            created = self.helmsman.fork_workers(role, target_role, ours)
        self._commands |= dict.fromkeys(created, ours)
        return created

    async def set_worker_env(self, worker_id: str, env: Mapping[str, Any] | None) -> None:
        """Set environment variables in a worker, before its engines are created."""
        self._require_engines(worker_id, "/set_env")
        texts = {name: str(value) for name, value in (env or {}).items()}
        with _areal_errors(worker_id, "set_worker_env"):
            await self.helmsman.set_worker_env(worker_id, texts)

    async def create_engine(
        self, worker_id: str, engine: Any, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Build an engine, a class or its import path; it has the worker's id as default name."""
        self._require_engines(worker_id, "/create_engine")
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
        self._names = _take_names(exp_config, options)
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
        n_gpus_per_node: Number of accelerators per node; the observed number when None.
        startup_timeout: Limit in seconds for starting workers, and for ``get_workers``.
        exp_config: Experiment whose names and ``cluster.n_gpus_per_node`` are used.
        **options: AReaL's options, as for LocalScheduler; those of Helmsman's RayScheduler.
    """

    _reserves_memory = True

    def __init__(
        self,
        n_gpus_per_node: int | None = None,
        *,
        startup_timeout: float = 300.0,
        exp_config: Any = None,
        **options: Any,
    ) -> None:
        self._names = _take_names(exp_config, options)
        if exp_config is not None:
            n_gpus_per_node = exp_config.cluster.n_gpus_per_node
        self._n_gpus_per_node = n_gpus_per_node
        options.setdefault("timeouts", helmsman.Timeouts(start_s=startup_timeout))
        super().__init__(helmsman.RayScheduler(**options), startup_timeout)
