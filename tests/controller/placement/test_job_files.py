"""Files of jobs and nodes: what they say, and what is said of those that make no sense."""

from __future__ import annotations

from pathlib import Path

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
    Job(role="train", replicas=2, tasks=[SchedulingSpec(cpu=4, gpu=1, env_vars={"A": "b=c,d"}, nodelist=["gpu-0"])]),
    Job(role="ref", scheduling_strategy=SchedulingStrategy(type="colocation", target="train", fork=True)),
]


@pytest.mark.parametrize(("name", "text"), [("jobs.yaml", YAML), ("jobs.toml", TOML), ("list.yml", YAML.split("jobs:")[1])])
def test_jobs(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = load_jobs(str(path))
    assert [(job.role, job.replicas, list(job.tasks), job.scheduling_strategy) for job in found] == [
        (job.role, job.replicas, list(job.tasks), job.scheduling_strategy) for job in JOBS
    ]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "- {role: a, tasks: [{gpus: 1}]}",
            ["jobs[0].tasks[0].gpus", "SchedulingSpec has no such field", "did you mean 'gpu'?"],
        ),
        ("- {role: a, replica: 1}", ["jobs[0].replica", "did you mean 'replicas'?"]),
        ("- {role: a, xyz: 1}", ["jobs[0].xyz", "there are: role, replicas"]),
        ("- {role: a, tasks: [{cpu: many}]}", ["jobs[0].tasks[0].cpu", "Expected `float`, got `str`"]),
        ("- {role: a, scheduling_strategy: {type: beside}}", ["jobs[0].scheduling_strategy.type", "beside"]),
        ("- {replicas: 1}", ["jobs[0]", "missing required field `role`"]),
        ("- 7", ["jobs[0]", "expected the fields of a Job, got 7"]),
        ("jobs: 7", ["jobs", "expected a list of jobs, or one under the key 'jobs'"]),
        ("a: [", ["the file", "expected"]),
    ],
)
def test_what_makes_no_sense_is_said_with_its_place(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(JobsFileError) as caught:
        load_jobs(str(path))
    for fact in (str(path), *facts):
        assert fact in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(JobsFileError, match=r"nowhere\.toml: the file: .*No such file"):
        load_jobs("nowhere.toml")


def test_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
nodes:
  - {name: head, cpu: 8}
  - {count: 2, name: "gpu-{index:02}", cpu: 64, gpu: 8, mem: 100, accelerator_type: H100, labels: {rack: a},
     free: {gpu: 3, mem: 5}}
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
    ("text", "facts"),
    [
        ("- {gpus: 8}", ["nodes[0].gpus", "did you mean 'gpu'?"]),
        ("- {count: 2, name: '{nr}'}", ["nodes[0].name", "'{nr}'"]),
        ("- {count: 2, name: same}", ["nodes[0].name", "'same' twice", "{index}"]),
        ("- {gpu: 1.5}", ["nodes[0].gpu", "Expected `int`"]),
    ],
)
def test_a_cluster_that_makes_no_sense(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(JobsFileError) as caught:
        load_cluster(str(path))
    for fact in facts:
        assert fact in str(caught.value)
