"""The roles of a run: what each needs, and its controller."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

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
from helmsman.api.scheduler import PlacementStrategy
from helmsman.policies import LeastOutstandingTokens, PrefixAffinity, RoundRobin
from helmsman.recipes.settings import Cluster, GRPOSettings, RunSettings
from helmsman.weights import ViaCollective, ViaDisk, ViaMemory, WeightFormat

ENGINE_MODULES = ("torch", "helmsman.engines.train", "helmsman.engines.rollout")
"""Workers that are forked from a process which has imported these start in a tenth of the time."""
TRAINER = "helmsman.engines.train.FSDPTrainEngine"
ENGINES = {
    "vllm": "helmsman.engines.vllm_engine.VLLMEngine",
    "hf": "helmsman.engines.rollout.HFRolloutEngine",
    "server": "helmsman.engines.server_engine.ServerEngine",
}
"""Rollout engines by name."""
_POLICIES = {
    "least_tokens": LeastOutstandingTokens,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
}


def make_jobs(settings: GRPOSettings) -> list[Job]:
    """Trainer, rollout, and the reference where there is a KL term, in the order of their start."""
    cluster = settings.cluster
    has_devices = bool(cluster.devices_per_node)

    def env_vars(threads: int) -> dict[str, str]:
        return {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **cluster.env_vars}

    def spec(role: str, devices: int, cpus: float, mem: float, threads: int) -> SchedulingSpec:
        spans_nodes = has_devices and devices > cluster.devices_per_node
        placement: PlacementStrategy = (
            "shared" if role == "train" else "deferred" if spans_nodes else "separate"
        )
        return SchedulingSpec(
            cpu=cpus,
            gpu=devices if has_devices else 0,
            mem=mem,
            port_count=1,  # for the ranks to meet, or for the instance's server
            env_vars=env_vars(threads),
            ray_placement_strategy=placement,
        )

    train = spec("train", 1, cluster.train_cpus, cluster.train_mem, cluster.train_threads)
    rollout = spec(
        "rollout",
        cluster.rollout_devices,
        cluster.rollout_cpus,
        cluster.rollout_mem,
        cluster.rollout_threads,
    )
    beside = SchedulingStrategy(type="colocation", target="train", fork=True)
    forked = SchedulingSpec(env_vars=env_vars(cluster.rollout_threads), port_count=1)
    is_colocated = cluster.placement == "colocated"
    jobs = [
        Job(role="train", replicas=cluster.train_workers, tasks=[train]),
        Job(
            role="rollout",
            replicas=cluster.rollout_instances,
            tasks=[forked if is_colocated else rollout],
            scheduling_strategy=beside if is_colocated else SchedulingStrategy(),
        ),
    ]
    if settings.algorithm.kl_coef:
        reference = SchedulingSpec(env_vars=env_vars(cluster.train_threads), port_count=1)
        jobs.append(
            Job(
                role="reference",
                replicas=cluster.train_workers,
                tasks=[reference],
                scheduling_strategy=beside,
            )
        )
    return jobs


def start_scheduler(cluster: Cluster, seed: int, log_dir: Path | None) -> Scheduler:
    """The scheduler of the settings, with its nodes there."""
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
    """The controller of the trainer, or of the reference, which is such an engine that takes no
    step."""
    arguments = {
        "model": settings.model,
        "seed": settings.seed,
        "lr": settings.train.lr,
        **settings.train.engine,
    }
    return TrainController(
        scheduler,
        TRAINER,
        job,
        engine_kwargs={**arguments, "frozen": True} if job.role == "reference" else arguments,
        model_parallel_size=settings.train.model_parallel_size,
    )


def make_rollout(settings: GRPOSettings, scheduler: Scheduler, job: Job) -> RolloutController:
    """The controller of the instances."""
    rollout = settings.rollout
    return RolloutController(
        scheduler,
        ENGINES.get(rollout.engine, rollout.engine),
        job,
        engine_kwargs=engine_arguments(settings),
        max_in_flight_per_worker=rollout.max_in_flight,
        policy=_POLICIES[rollout.policy](),
        retries=RetryGeneration(),
        supervision=SupervisionPolicy(),
    )


def engine_arguments(settings: GRPOSettings) -> dict[str, Any]:
    """What the rollout engine is built with; ``rollout.engine_args`` has the last word."""
    rollout, cluster = settings.rollout, settings.cluster
    arguments: dict[str, Any] = {
        "model": settings.model,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
    }
    if rollout.engine in ("hf", "vllm"):
        arguments["max_concurrency"] = rollout.max_in_flight
    if rollout.engine in ("vllm", "server"):
        arguments["tensor_parallel_size"] = (
            cluster.rollout_devices if cluster.devices_per_node else 1
        )
        arguments["enable_sleep_mode" if rollout.engine == "vllm" else "sleep"] = (
            cluster.takes_turns
        )
    return {**arguments, **rollout.engine_args}


def make_sync(
    settings: GRPOSettings, trainer: TrainController, rollout: RolloutController
) -> WeightSync:
    """The way of the weights."""
    sync = settings.sync
    way = (
        ViaDisk(sync.folder or str(Path(settings.out).absolute() / "weights"))
        if sync.way == "disk"
        else ViaCollective()
        if sync.way == "collective"
        else ViaMemory()
    )
    form = WeightFormat(dtype=sync.dtype, bucket_bytes=sync.bucket_mb << 20, checksum=sync.checksum)
    return WeightSync(trainer, rollout, way, form=form, in_flight=sync.in_flight)


def learning_rate(settings: RunSettings, step: int) -> float:
    """That of a step, from 1; the engine's own warm-up comes on top."""
    train = settings.train
    done = (step - 1) / max(1, settings.steps - 1)
    if train.lr_schedule == "constant":
        return train.lr
    fallen = done if train.lr_schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return train.lr * (1 - (1 - train.lr_end) * fallen)
