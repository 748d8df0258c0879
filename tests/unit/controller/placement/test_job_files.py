"""Files of jobs and nodes: their content, and errors that name the invalid entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import JobsFileError
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._placement.job_files import load_cluster, load_jobs

YAML = """
jobs:
  - role: train
    replicas: 2
    tasks: [{cpu: 4, gpu: 1, env_vars: {A: "b=c,d"}, nodelist: [gpu-0]}]
  - role: ref
    scheduling_strategy: {type: colocation, target: train, fork: true}
"""
TOML = """
[[jobs]]
role = "train"
replicas = 2
tasks = [{cpu = 4, gpu = 1, env_vars = {A = "b=c,d"}, nodelist = ["gpu-0"]}]

[[jobs]]
role = "ref"
scheduling_strategy = {type = "colocation", target = "train", fork = true}
"""
JOBS = [
    Job(
        role="train",
        replicas=2,
        tasks=[SchedulingSpec(cpu=4, gpu=1, env_vars={"A": "b=c,d"}, nodelist=["gpu-0"])],
    ),
    Job(
        role="ref",
        scheduling_strategy=SchedulingStrategy(type="colocation", target="train", fork=True),
    ),
]


@pytest.mark.parametrize(
    ("name", "text"),
    [("jobs.yaml", YAML), ("jobs.toml", TOML), ("list.yml", YAML.split("jobs:")[1])],
)
def test_load_jobs(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = load_jobs(str(path))
    assert [
        (job.role, job.replicas, list(job.tasks), job.scheduling_strategy) for job in found
    ] == [(job.role, job.replicas, list(job.tasks), job.scheduling_strategy) for job in JOBS]


def test_load_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
nodes:
  - {name: head, cpu: 8}
  - {count: 2, name: "gpu-{index:02}", cpu: 64, gpu: 8, mem: 100, accelerator_type: H100,
     labels: {rack: a}, free: {gpu: 3, mem: 5}}
  - {count: 1, cpu: 64, npu: 8, resources: {license: 1}}
"""
    )
    head, first, second, npu = load_cluster(str(path)).nodes
    assert (head.address, head.total) == ("head", {"CPU": 8.0})
    assert [first.address, second.address, npu.address] == ["gpu-00", "gpu-01", "node-0"]
    assert first.total == {"CPU": 64.0, "GPU": 8.0, "memory": 100e9, "accelerator_type:H100": 1.0}
    assert first.available == {**first.total, "GPU": 3.0, "memory": 5e9}
    assert first.labels == {"rack": "a"}
    assert npu.total == {"CPU": 64.0, "NPU": 8.0, "license": 1.0}


@pytest.mark.parametrize(
    ("load", "text", "facts"),
    [
        (
            load_jobs,
            "- {role: a, tasks: [{gpus: 1}]}",
            ["jobs[0].tasks[0].gpus", "SchedulingSpec has no", "did you mean 'gpu'?"],
        ),
        (load_jobs, "- {role: a, replica: 1}", ["jobs[0].replica", "did you mean 'replicas'?"]),
        (load_jobs, "- {role: a, xyz: 1}", ["jobs[0].xyz", "there are: role, replicas"]),
        (
            load_jobs,
            "- {role: a, tasks: [{cpu: many}]}",
            ["jobs[0].tasks[0].cpu", "Expected `float`, got `str`"],
        ),
        (
            load_jobs,
            "- {role: a, scheduling_strategy: {type: beside}}",
            ["jobs[0].scheduling_strategy.type", "beside"],
        ),
        (load_jobs, "- {replicas: 1}", ["jobs[0]", "missing required field `role`"]),
        (load_jobs, "- 7", ["jobs[0]", "expected the fields of a Job, got 7"]),
        (load_jobs, "jobs: 7", ["jobs", "expected a list of jobs, or one under the key 'jobs'"]),
        (load_jobs, "a: [", ["the file", "expected"]),
        (load_cluster, "- {gpus: 8}", ["nodes[0].gpus", "did you mean 'gpu'?"]),
        (load_cluster, "- {count: 2, name: '{nr}'}", ["nodes[0].name", "'{nr}'"]),
        (load_cluster, "- {count: 2, name: same}", ["nodes[0].name", "'same' twice", "{index}"]),
        (load_cluster, "- {gpu: 1.5}", ["nodes[0].gpu", "Expected `int`"]),
        (
            load_jobs,
            "- {role: a}\n- {role: b, replicas: 1000000000}",
            ["jobs[1]", "replicas is 1000000000; expected 1 or more, at most 100,000"],
        ),
        (
            load_jobs,
            "- {role: a, replicas: 60000}\n- {role: b, replicas: 70000}",
            ["jobs[1].replicas", "70,000 here, 130,000 in the file, expected at most 100,000"],
        ),
        (load_jobs, "- {role: a, replicas: 1e400}", ["jobs[0].replicas", "Expected `int`"]),
        (load_jobs, "- {role: a, tasks: [{cpu: .nan}]}", ["jobs[0]", "cpu is nan; expected 0"]),
        (load_jobs, "- {role: a, tasks: [{cpu: 1e308}]}", ["jobs[0]", "at most 1e+15"]),
        (load_jobs, "- {role: a}\n" * 65, ["jobs", "65 entries, expected at most 64"]),
        (load_jobs, "- [" + "x," * 1000 + "]", ["jobs[0]", "expected the fields of a Job, got ["]),
        (
            load_cluster,
            "- {count: 1000000000}",
            ["nodes[0].count", "1,000,000,000 here", "expected at most 100,000"],
        ),
        (load_cluster, "- {gpu: 1000000000}", ["nodes[0].devices", "expected at most 1,000,000"]),
        (load_cluster, "- {count: -1}", ["nodes[0].count", "-1, expected 0 or more"]),
        (load_cluster, "- {free: {cpu: .inf}}", ["nodes[0].free.cpu", "inf, expected 0 or more"]),
        (
            load_cluster,
            "- {name: '{index:1000000000}'}",
            ["nodes[0].name", "the format has a width of more than 3 digits"],
        ),
        (
            load_cluster,
            "- {count: 1000, name: '{index:{index}}'}",
            ["nodes[0].name", "the name has 254 characters, expected at most 253"],
        ),
    ],
)
def test_load_names_the_place_of_an_error(
    tmp_path: Path, load: Callable[[str], Any], text: str, facts: list[str]
) -> None:
    path = tmp_path / "entries.yaml"
    path.write_text(text)
    with pytest.raises(JobsFileError) as caught:
        load(str(path))
    assert [fact for fact in (str(path), *facts) if fact not in str(caught.value)] == []
    assert len(str(caught.value)) < 500


def test_load_jobs_missing_file() -> None:
    with pytest.raises(JobsFileError, match=r"nowhere\.toml: the file: .*No such file"):
        load_jobs("nowhere.toml")
