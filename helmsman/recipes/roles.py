"""Jobs, scheduler, controllers and weight sync of a run."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from helmsman import (
    Job,
    RetryGeneration,
    RolloutController,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    SupervisionPolicy,
    Timeouts,
    TrainController,
    WeightSync,
    make_scheduler,
)
from helmsman.policies import LeastOutstandingTokens, PrefixAffinity, RoundRobin
from helmsman.recipes.settings import (
    GRPOSettings,
    Machines,
    Reward,
    RunSettings,
    distillation,
    name_of,
)
from helmsman.weights import ViaCollective, ViaDevice, ViaDisk, ViaMemory, WeightFormat

ENGINE_MODULES = ("torch", "helmsman.engines.train", "helmsman.engines.rollout")
"""Preloaded modules: workers forked from a process with them start in a tenth of the time."""
TRAINER = "helmsman.engines.train.FSDPTrainEngine"
ENGINES = {
    "vllm": "helmsman.engines.vllm_engine.VLLMEngine",
    "hf": "helmsman.engines.rollout.HFRolloutEngine",
    "server": "helmsman.engines.server_engine.ServerEngine",
}
"""Rollout engines by name."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""
_RANKED = ("train", "reference", "teacher", "critic")
"""Roles of ranks; the others are instances."""
_POLICIES = {
    "least_tokens": LeastOutstandingTokens,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
}


def make_jobs(settings: GRPOSettings) -> list[Job]:
    """Return the jobs in start order: trainer, rollout, reference, teacher, critic, judges."""
    cluster, jobs = settings.cluster, [train_job(settings)]
    if not settings.rollout.is_recorded:
        jobs.append(_rollout_job(cluster))
    if settings.algorithm.kl_coef and settings.train.lora is None:
        jobs.append(sibling_job(settings, "reference"))
    jobs += teacher_jobs(settings)
    if settings.algorithm.preset == "ppo":
        jobs.append(sibling_job(settings, "critic"))
    return jobs + [
        _instances(cluster, judge_role(each), each.instances, each.devices)
        for each in settings.judges
    ]


def judge_role(reward: Reward) -> str:
    """Return the role of a reward's judge."""
    return f"judge-{name_of(reward)}".replace("/", "-").strip()


def _instances(cluster: Machines, role: str, replicas: int, devices: int) -> Job:
    """Return the job of instances with devices of their own."""
    spec = SchedulingSpec(
        cpu=cluster.rollout_cpus,
        gpu=devices if cluster.devices_per_node else 0,
        mem=cluster.rollout_mem,
        port_count=1,  # for the instance's server
        env_vars=_env_vars(cluster, cluster.rollout_threads),
        ray_placement_strategy="deferred" if 0 < cluster.devices_per_node < devices else "separate",
    )
    return Job(role=role, replicas=replicas, tasks=[spec])


def train_job(settings: RunSettings, role: str = "train", replicas: int = 0) -> Job:
    """Return the job of the trainer, or of ranks on devices of their own."""
    cluster = settings.cluster
    spec = SchedulingSpec(
        cpu=cluster.train_cpus,
        gpu=1 if cluster.devices_per_node else 0,
        mem=cluster.train_mem,
        port_count=1,  # for the ranks' rendezvous
        env_vars=_env_vars(cluster, cluster.train_threads),
        ray_placement_strategy="shared",
    )
    return Job(role=role, replicas=replicas or cluster.train_workers, tasks=[spec])


def teacher_jobs(settings: RunSettings) -> list[Job]:
    """Return the job of the teacher, if there is one."""
    found, _ = distillation(settings)
    if not found.teacher:
        return []
    alone = found.teacher_workers
    return [train_job(settings, "teacher", alone) if alone else sibling_job(settings, "teacher")]


def takes_turns(settings: RunSettings, role: str) -> bool:
    """Return whether the ranks of a role share their devices with rollout instances."""
    if not isinstance(settings, GRPOSettings) or not settings.cluster.takes_turns:
        return False
    return role != "teacher" or not settings.algorithm.teacher_workers


@contextlib.contextmanager
def awake(ranks: TrainController, is_shared: bool) -> Iterator[None]:
    """Wake ranks on shared devices for a block; after an error in it they are not put to sleep."""
    if is_shared:
        ranks.wake()
    yield
    if is_shared:
        ranks.sleep()


def _rollout_job(cluster: Machines) -> Job:
    instances = cluster.rollout_instances
    if cluster.placement == "colocated":
        return _beside_trainer(cluster, "rollout", instances, cluster.rollout_threads)
    return _instances(cluster, "rollout", instances, cluster.rollout_devices)


def sibling_job(settings: RunSettings, role: str) -> Job:
    """Return the job of a model beside the trainer: a process next to each rank, on its device."""
    cluster = settings.cluster
    return _beside_trainer(cluster, role, cluster.train_workers, cluster.train_threads)


def _beside_trainer(cluster: Machines, role: str, replicas: int, threads: int) -> Job:
    spec = SchedulingSpec(env_vars=_env_vars(cluster, threads), port_count=1)
    strategy = SchedulingStrategy(type="colocation", target="train", fork=True)
    return Job(role=role, replicas=replicas, tasks=[spec], scheduling_strategy=strategy)


def _env_vars(cluster: Machines, threads: int) -> dict[str, str]:
    return {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **cluster.env_vars}


def start_scheduler(cluster: Machines, seed: int, log_dir: Path | None) -> Scheduler:
    """Start the scheduler of the settings."""
    timeouts = Timeouts(
        start_s=cluster.start_timeout_s,
        create_engine_s=cluster.engine_timeout_s,
        call_s=cluster.call_timeout_s,
    )
    options: dict[str, Any] = {"seed": seed, "log_dir": log_dir, "timeouts": timeouts}
    if cluster.scheduler != "inline":
        options["preload"] = ENGINE_MODULES
    if cluster.scheduler == "ray":
        options |= {"address": cluster.address, "num_nodes": cluster.num_nodes}
    return make_scheduler(cluster.scheduler, **options)


def make_trainer(settings: RunSettings, scheduler: Scheduler, job: Job) -> TrainController:
    """Return the controller of trainer, reference, teacher or critic, by the job's role."""
    arguments = {
        "model": settings.model,
        "seed": settings.seed,
        "lr": settings.train.lr,
        **settings.train.engine,
    }
    if job.role != "train":
        arguments.pop("lora", None)
    elif settings.train.lora and settings.train.lora.get("path"):
        path = str(Path(settings.train.lora["path"]).absolute())  # for another working directory
        arguments["lora"] = {**settings.train.lora, "path": path}
    if job.role in ("reference", "teacher"):
        arguments["frozen"] = True
    if job.role == "teacher":
        arguments["model"] = str(Path(distillation(settings)[0].teacher).absolute())
    if job.role == "critic" and isinstance(settings, GRPOSettings):
        arguments |= {"head": "value", "init": "value_head", "lr": settings.critic.lr}
    return TrainController(
        scheduler,
        TRAINER,
        job,
        engine_kwargs=arguments,
        model_parallel_size=settings.train.model_parallel_size,
    )


def start_ranks(
    settings: RunSettings, scheduler: Scheduler, jobs: Mapping[str, Job]
) -> dict[str, TrainController]:
    """Start trainer, reference, teacher and critic; those that take turns sleep afterwards.

    Args:
        settings: The settings of the run.
        scheduler: The scheduler of the run, whose end closes them.
        jobs: Jobs by role, in start order; those of instances are left out.

    Returns:
        The controllers by role.
    """
    ranked = {
        role: make_trainer(settings, scheduler, job)
        for role, job in jobs.items()
        if role in _RANKED
    }
    for role, controller in ranked.items():
        controller.initialize()
        if takes_turns(settings, role):
            controller.sleep()  # the next controller needs the devices
    return ranked


def make_rollout(
    settings: GRPOSettings, scheduler: Scheduler, job: Job, timeout_s: float | None = None
) -> RolloutController:
    """Return the controller of the rollout instances.

    Args:
        settings: The settings of the run.
        scheduler: The scheduler of the run.
        job: The job of the instances.
        timeout_s: Seconds from sending a request to its result; ``cluster.call_timeout_s`` if None.
    """
    rollout = settings.rollout
    return RolloutController(
        scheduler,
        ENGINES.get(rollout.engine, rollout.engine),
        job,
        engine_kwargs=engine_arguments(settings),
        max_in_flight_per_worker=rollout.max_in_flight,
        max_queue=1 << 30,  # a judge must not wait in submit
        request_timeout=timeout_s,
        policy=_POLICIES[rollout.policy](),
        retries=RetryGeneration(),
        supervision=SupervisionPolicy(),
    )


def engine_arguments(settings: GRPOSettings) -> dict[str, Any]:
    """Return the arguments of the rollout engine; ``rollout.engine_args`` overrides the rest."""
    rollout, cluster, lora = settings.rollout, settings.cluster, settings.train.lora
    arguments: dict[str, Any] = {
        "model": settings.model,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
    }
    if rollout.engine in ("hf", "vllm"):
        arguments["max_concurrency"] = rollout.max_in_flight
    if rollout.engine in ("vllm", "server"):
        num_devices = cluster.rollout_devices if cluster.devices_per_node else 1
        sleeps = "enable_sleep_mode" if rollout.engine == "vllm" else "sleep"
        arguments |= {"tensor_parallel_size": num_devices, sleeps: cluster.takes_turns}
        if lora is not None and sends_adapters(settings):
            rank = adapter_rank(lora)
            arguments["max_lora_rank"] = next((each for each in _VLLM_RANKS if each >= rank), rank)
            # Requests of each version that may still be trained on can be in one batch.
            arguments["max_loras"] = 2 + math.ceil(rollout.staleness)
    return {**arguments, **rollout.engine_args}


def sends_adapters(settings: GRPOSettings) -> bool:
    """Return whether adapters are trained, and sent alone."""
    way, engine, lora = settings.sync.lora, settings.rollout.engine, settings.train.lora
    if lora is None or way != "auto":
        return lora is not None and way == "adapter"
    may_be_experts = engine != "hf" and "experts" in str(lora.get("targets", ""))
    return engine in ENGINES and not may_be_experts and not unfit_adapters(settings)


def unfit_adapters(settings: GRPOSettings) -> str:
    """Return why instances cannot take the adapters alone, as settings show it, or nothing."""
    engine, lora = settings.rollout.engine, settings.train.lora
    if lora is None or settings.cluster.rollout_spans_nodes:
        return "train.engine.lora is not given" if lora is None else "an instance spans nodes"
    targets = lora.get("targets", "")  # what a regular expression matches, only the model tells
    listed = () if isinstance(targets, str) else targets
    of_experts: Any = [each for each in listed if re.fullmatch(r"(.*\.)?experts\.[a-z_]+", each)]
    if engine in ("vllm", "server") and lora.get("path"):
        of_experts = read_adapter(lora["path"]).get("target_parameters")
    unfit = f"rollout.engine {engine!r} takes no adapters of experts that are one tensor"
    return unfit if engine in ("vllm", "server") and of_experts else ""


def read_adapter(folder: str) -> dict[str, Any]:
    """Return the entries of a PEFT folder's adapter_config.json.

    Raises:
        ValueError: There is none, or it is not of a LoRA adapter.
    """
    path = Path(folder) / "adapter_config.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        kind, rank = found.get("peft_type", "LORA"), found.get("r")
        if kind != "LORA" or not isinstance(rank, int):
            raise ValueError(f"it has peft_type: {kind} and r: {rank}")
        return found
    except (OSError, ValueError) as error:
        raise ValueError(
            f"train.engine.lora.path is {folder}, whose {path.name} cannot be used: {error}; "
            "expected the folder of a LoRA adapter as PEFT writes it"
        ) from error


def adapter_rank(lora: Mapping[str, Any]) -> int:
    """Return the rank of ``train.engine.lora``, which may come from a folder."""
    if lora.get("path"):
        return int(read_adapter(lora["path"])["r"])
    return int(lora.get("rank", 16))


def make_sync(
    settings: GRPOSettings, trainer: TrainController, rollout: RolloutController
) -> WeightSync:
    """Return the weight sync of the settings."""
    sync = settings.sync
    ways: dict[str, Callable[[], Any]] = {
        "memory": ViaMemory,
        "device": ViaDevice,
        "collective": ViaCollective,
        "disk": lambda: ViaDisk(sync.folder or str(Path(settings.out).absolute() / "weights")),
    }
    way = None if sync.way == "auto" else ways[sync.way]()
    form = WeightFormat(
        dtype=sync.dtype,
        adapters=sends_adapters(settings),
        bucket_bytes=sync.bucket_mb << 20,
        checksum=sync.checksum,
    )
    return WeightSync(trainer, rollout, way, form=form, in_flight=sync.in_flight)


def learning_rate(settings: RunSettings, step: int) -> float:
    """Return the learning rate of a step, counted from 1; the engine applies warm-up on top."""
    train = settings.train
    done = (step - 1) / max(1, settings.steps - 1)
    if train.lr_schedule == "constant":
        return train.lr
    fallen = done if train.lr_schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return train.lr * (1 - (1 - train.lr_end) * fallen)
