"""What of the driver's environment reaches a worker: lists, and who wins."""

from __future__ import annotations

import pytest

from helmsman.api.environment import MASK, EnvironmentVariable, masked
from helmsman.api.scheduler import SchedulingSpec
from helmsman.controller.environment import (
    THREAD_VARIABLES,
    as_mapping,
    forwarding_of,
    forwarding_report,
    worker_environment,
)

EVERYWHERE = [
    *(
        "NCCL_DEBUG",
        "HCCL_CONNECT_TIMEOUT",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "HF_HOME",
        "HF_TOKEN",
    ),
    *("TRANSFORMERS_OFFLINE", "OMP_PROC_BIND", "GLOO_SOCKET_IFNAME", "UCX_TLS", "VLLM_USE_V1", "SGLANG_X", "TRITON_CACHE_DIR"),
    *("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "WANDB_API_KEY", "TOKENIZERS_PARALLELISM"),
    *("HELMSMAN_PORT_RANGE", "HELMSMAN_PLATFORM", "PYTHONUNBUFFERED", "TASK_QUEUE_ENABLE", "CUBLAS_WORKSPACE_CONFIG"),
]
THIS_MACHINE = [
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "http_proxy", "NO_PROXY", "SSL_CERT_FILE"),
    *("CUDA_HOME", "CUDA_MPS_PIPE_DIRECTORY", "ASCEND_HOME_PATH", "HCCL_IF_IP", "VLLM_HOST_IP", "NCCL_HOSTID"),
]
NOWHERE = [
    *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ASCEND_VISIBLE_DEVICES", "SOME_NEW_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "TORCHELASTIC_RUN_ID", "PET_NNODES", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "VLLM_DP_RANK", "VLLM_PORT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HELMSMAN_WORKER_TAG", "HELMSMAN_INSTANCE_DEVICES", "HELMSMAN_PORTS"),
    *("AWS_SECRET_ACCESS_KEY", "MY_SETTING", "SSH_AUTH_SOCK", "SLURM_PROCID"),
]


WAYS = {"everywhere": EVERYWHERE, "this machine": THIS_MACHINE, "nowhere": NOWHERE}


@pytest.mark.parametrize(("name", "reach"), [(name, reach) for reach, names in WAYS.items() for name in names])
def test_how_far_a_variable_goes(name: str, reach: str) -> None:
    assert forwarding_of(name).reach == reach
    assert forwarding_of(name).rule


ENVIRON = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "96", "MINE": "x", "RANK": "3"}


def test_another_node_gets_what_is_forwarded_and_keeps_its_own_paths() -> None:
    found = worker_environment(ENVIRON, SchedulingSpec(cpu=4), {"CUDA_VISIBLE_DEVICES": "1"}, same_machine=False)
    assert [each for each in found if each.name not in THREAD_VARIABLES] == [
        EnvironmentVariable("CUDA_VISIBLE_DEVICES", "1", "devices"),
        EnvironmentVariable("NCCL_DEBUG", "INFO", "driver"),
    ]


def test_a_worker_of_this_machine_gets_its_paths_too() -> None:
    found = as_mapping(worker_environment(ENVIRON, SchedulingSpec(), {}, same_machine=True))
    assert found["PATH"] == "/bin"
    assert not found.keys() & {"MINE", "RANK", "CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(("cpu", "count"), [(0, "1"), (0.5, "1"), (1, "1"), (2.9, "2"), (16, "16")])
def test_thread_counts_follow_the_cpus(cpu: float, count: str) -> None:
    found = {each.name: each for each in worker_environment(ENVIRON, SchedulingSpec(cpu=cpu), {}, same_machine=True)}
    for name in THREAD_VARIABLES:
        assert found[name] == EnvironmentVariable(name, count, "cpu count")


@pytest.mark.parametrize(("own", "others"), [("3", "3"), ("3,2", "3"), ("many", "4")])
def test_the_spec_s_own_thread_count_holds_for_all_libraries(own: str, others: str) -> None:
    spec = SchedulingSpec(cpu=4, env_vars={"OMP_NUM_THREADS": own})
    found = as_mapping(worker_environment({}, spec, {}, same_machine=True))
    assert found == {**dict.fromkeys(THREAD_VARIABLES, others), "OMP_NUM_THREADS": own}


def test_what_the_spec_says_wins_over_everything() -> None:
    wanted = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5", "NCCL_DEBUG": "WARN", "PATH": "/opt", "RAY_X": "a,b=c\nd"}
    found = worker_environment(ENVIRON, SchedulingSpec(env_vars=wanted), {"CUDA_VISIBLE_DEVICES": "1"}, same_machine=True)
    assert {each.name: each.value for each in found if each.source == "spec.env_vars"} == wanted
    assert [each.name for each in found] == sorted(each.name for each in found)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MYSQL_PWD", "db_password"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "RAY_AUTH_TOKEN", "SSH_PRIVATE_KEY", "SLACK_WEBHOOK", "OPENAI_APIKEY", "X_PASSWD"),
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert masked(name, "hunter2") == MASK
    assert masked(name, "") == "", "that it is empty is worth knowing"


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PWD", "NCCL_DEBUG", "PATH", "KEYBOARD", "MONKEY_ISLAND"])
def test_what_only_sounds_like_a_secret_is_shown(name: str) -> None:
    assert masked(name, "value") == "value"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://user:p%40ss@proxy:8080/x", f"http://{MASK}@proxy:8080/x"),
        ("http://user:p@ss@proxy:8080", f"http://{MASK}@proxy:8080"),
        ("https://ghp_abc@github.com/a/b", f"https://{MASK}@github.com/a/b"),
        ("a=http://u:p@h,b=ftp://v:q@i", f"a=http://{MASK}@h,b=ftp://{MASK}@i"),
        ("authorization=Bearer abc.def", f"authorization=Bearer {MASK}"),
        ("host=db password=hunter2 port=1", f"host=db password={MASK} port=1"),
        ("use hf_0123456789abcdefghij now", f"use {MASK} now"),
        ("http://host:80/path?at=me@home", "http://host:80/path?at=me@home"),
        ("expandable_segments:True,max_split_size_mb:128", "expandable_segments:True,max_split_size_mb:128"),
    ],
)
def test_a_secret_is_known_by_its_form(value: str, shown: str) -> None:
    assert masked("SETTING", value) == shown


def test_the_report_has_every_variable_once_masked_and_with_its_rule() -> None:
    report = forwarding_report({"WANDB_API_KEY": "abc", "MINE": "http://a:b@c", "NCCL_DEBUG": "INFO", "RANK": "0"})
    assert [(row.name, row.value, row.reach) for row in report] == [
        ("MINE", f"http://{MASK}@c", "nowhere"),
        ("NCCL_DEBUG", "INFO", "everywhere"),
        ("RANK", "0", "nowhere"),
        ("WANDB_API_KEY", MASK, "everywhere"),
    ]
    assert "env_vars" in report[0].rule
    assert "NCCL_*" in report[1].rule
    assert "process group" in report[2].rule
