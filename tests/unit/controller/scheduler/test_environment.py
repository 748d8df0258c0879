"""Tests of the environment of workers and of masked secrets."""

from __future__ import annotations

import pytest

from helmsman.api.environment import (
    MASK,
    MASK_VARIABLE,
    EnvironmentVariable,
    masked,
    masked_command,
)
from helmsman.api.scheduler import SchedulingSpec
from helmsman.controller._scheduler.environment import (
    THREAD_VARIABLES,
    as_mapping,
    forwarding_of,
    forwarding_report,
    worker_environment,
)

REACHES = {
    "everywhere": "NCCL_DEBUG HCCL_CONNECT_TIMEOUT TORCH_NCCL_AVOID_RECORD_STREAMS "
    "PYTORCH_CUDA_ALLOC_CONF HF_HOME HF_TOKEN "
    "TRANSFORMERS_OFFLINE OMP_PROC_BIND GLOO_SOCKET_IFNAME UCX_TLS VLLM_USE_V1 SGLANG_X "
    "TRITON_CACHE_DIR "
    "ASCEND_LAUNCH_BLOCKING CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ORDER WANDB_API_KEY "
    "TOKENIZERS_PARALLELISM HELMSMAN_PORT_RANGE "
    "HELMSMAN_PLATFORM PYTHONUNBUFFERED TASK_QUEUE_ENABLE CUBLAS_WORKSPACE_CONFIG",
    "this machine": "PATH HOME LANG LC_ALL TMPDIR LD_LIBRARY_PATH PYTHONPATH http_proxy NO_PROXY "
    "SSL_CERT_FILE CUDA_HOME "
    "CUDA_MPS_PIPE_DIRECTORY ROCR_VISIBLE_DEVICES ASCEND_HOME_PATH HCCL_IF_IP VLLM_HOST_IP "
    "NCCL_HOSTID",
    "nowhere": "CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES "
    "HIP_VISIBLE_DEVICES "
    "ASCEND_VISIBLE_DEVICES SOME_NEW_VISIBLE_DEVICES RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR "
    "MASTER_PORT GROUP_RANK "
    "TORCHELASTIC_RUN_ID PET_NNODES RAY_ADDRESS RAY_AUTH_TOKEN VLLM_DP_RANK VLLM_PORT "
    "OMP_NUM_THREADS MKL_NUM_THREADS "
    "HELMSMAN_WORKER_TAG HELMSMAN_INSTANCE_DEVICES HELMSMAN_PORTS AWS_SECRET_ACCESS_KEY "
    "MY_SETTING SSH_AUTH_SOCK SLURM_PROCID",
}


def test_forwarding_of() -> None:
    for reach, names in REACHES.items():
        assert {name: forwarding_of(name).reach for name in names.split()} == dict.fromkeys(
            names.split(), reach
        )
        assert all(forwarding_of(name).rule for name in names.split())


ENVIRON = {
    "NCCL_DEBUG": "INFO",
    "PATH": "/bin",
    "CUDA_VISIBLE_DEVICES": "7",
    "OMP_NUM_THREADS": "96",
    "MINE": "x",
    "RANK": "3",
}


def test_worker_environment_by_machine() -> None:
    found = worker_environment(
        ENVIRON, SchedulingSpec(cpu=4), {"CUDA_VISIBLE_DEVICES": "1"}, same_machine=False
    )
    assert [each for each in found if each.name not in THREAD_VARIABLES] == [
        EnvironmentVariable("CUDA_VISIBLE_DEVICES", "1", "devices"),
        EnvironmentVariable("GOMP_SPINCOUNT", "1000", "default"),
        EnvironmentVariable("NCCL_DEBUG", "INFO", "driver"),
    ]
    here = as_mapping(worker_environment(ENVIRON, SchedulingSpec(), {}, same_machine=True))
    assert here["PATH"] == "/bin"
    assert not here.keys() & {"MINE", "RANK", "CUDA_VISIBLE_DEVICES"}


def test_worker_environment_thread_counts() -> None:
    """Counts follow the number of CPUs, or the spec's count of one library for all."""
    for cpu, count in ((0, "1"), (0.5, "1"), (1, "1"), (2.9, "2"), (16, "16")):
        found = {
            each.name: each
            for each in worker_environment(ENVIRON, SchedulingSpec(cpu=cpu), {}, same_machine=True)
        }
        for name in THREAD_VARIABLES:
            assert found[name] == EnvironmentVariable(name, count, "cpu count")
    for own, others in (("3", "3"), ("3,2", "3"), ("many", "4")):
        spec = SchedulingSpec(cpu=4, env_vars={"OMP_NUM_THREADS": own})
        values = as_mapping(worker_environment({}, spec, {}, same_machine=True))
        del values["GOMP_SPINCOUNT"]
        assert values == {**dict.fromkeys(THREAD_VARIABLES, others), "OMP_NUM_THREADS": own}


def test_worker_environment_spin_settings() -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        from_driver = worker_environment({name: "9"}, SchedulingSpec(), {}, same_machine=False)
        assert EnvironmentVariable(name, "9", "driver") in from_driver
        from_spec = worker_environment(
            {}, SchedulingSpec(env_vars={name: "9"}), {}, same_machine=True
        )
        assert EnvironmentVariable(name, "9", "spec.env_vars") in from_spec
        for found in (from_driver, from_spec):
            assert "default" not in {each.source for each in found}


def test_worker_environment_spec_has_precedence() -> None:
    wanted = {
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "5",
        "NCCL_DEBUG": "WARN",
        "PATH": "/opt",
        "RAY_X": "a,b=c\nd",
    }
    found = worker_environment(
        ENVIRON, SchedulingSpec(env_vars=wanted), {"CUDA_VISIBLE_DEVICES": "1"}, same_machine=True
    )
    assert {each.name: each.value for each in found if each.source == "spec.env_vars"} == wanted
    assert [each.name for each in found] == sorted(each.name for each in found)


SECRET_NAMES = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD MYSQL_PWD "
    "db_password RAY_AUTH_TOKEN "
    "GOOGLE_APPLICATION_CREDENTIALS SSH_PRIVATE_KEY SLACK_WEBHOOK OPENAI_APIKEY X_PASSWD MY_CREDS "
    "CREDS DB_PASS "
    "REDISCLI_AUTH GITHUB_PAT SIGNING_KEYS my-api-key SERVICE_JWT"
)
OTHER_NAMES = (
    "TOKENIZERS_PARALLELISM PWD NCCL_DEBUG PATH KEYBOARD MONKEY_ISLAND SSH_AUTH_SOCK SSH_ASKPASS"
)


def test_masked_by_name() -> None:
    for name in SECRET_NAMES.split():
        assert masked(name, "hunter2") == MASK, name
        assert masked(name, "") == "", "an empty value is shown"
    for name in OTHER_NAMES.split():
        assert masked(name, "value") == "value", name


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://user:p%40ss@proxy:8080/x", f"http://{MASK}@proxy:8080/x"),
        ("http://user:p@ss@proxy:8080", f"http://{MASK}@proxy:8080"),
        ("https://ghp_abc@github.com/a/b", f"https://{MASK}@github.com/a/b"),
        ("a=http://u:p@h,b=ftp://v:q@i", f"a=http://{MASK}@h,b=ftp://{MASK}@i"),
        ("authorization=Bearer abc.def", f"authorization=Bearer {MASK}"),
        ("host=db password=hunter2 port=1", f"host=db password={MASK} port=1"),
        ('{"user": "me", "password": "hunter2"}', '{"user": "me", "password": "' + MASK + '"}'),
        ("AccountName=x;AccountKey=abc/de==;E=1", f"AccountName=x;AccountKey={MASK};E=1"),
        ("WANDB_API_KEY=hunter2,NCCL_DEBUG=INFO", f"WANDB_API_KEY={MASK},NCCL_DEBUG=INFO"),
        ("use hf_0123456789abcdefghij now", f"use {MASK} now"),
        ("http://host:80/path?at=me@home", "http://host:80/path?at=me@home"),
        (
            "expandable_segments:True,max_split_size_mb:128",
            "expandable_segments:True,max_split_size_mb:128",
        ),
    ],
)
def test_masked_by_form(value: str, shown: str) -> None:
    assert masked("SETTING", value) == shown


COMMIT = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh",
        "sk-proj-4f9aK2mQ8ZxW7bT1",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "github_pat_11ABCDEFG0123456789_abc",
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4fwpM",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEow\ncut off",
        "q7Zt2LmX9vKc4RwB8nYf3JdH6sGp1UaE",
        "p3Vq8_Zk1Tn-6Yb4Wm0Rc9Xs2Hf7Lj5Gd",
    ],
)
def test_masked_hides_values_that_look_like_keys(secret: str) -> None:
    assert masked("SETTING", secret) == MASK
    assert masked("SETTING", f"before {secret}") == f"before {MASK}"


@pytest.mark.parametrize(
    "value",
    [
        COMMIT,
        f"{COMMIT},SOME-OTHER,{COMMIT}",
        f"/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/{COMMIT}",
        f"ghcr.io/org/image@sha256:{COMMIT}{COMMIT[:24]}",
        "123e4567-e89b-12d3-a456-426614174000",
        "/usr/local/cuda-12.4/bin:/root/token:/usr/bin",
        "/nix/store/0c7c96gikmzv87i7lv3vq5s1cmfjd6zf-glibc-2.38/lib",
        "DeepSeek-R1-Distill-Qwen-32B-AWQ-Int4-G128",
        "NVIDIA_H100_80GB_HBM3_MIG_1g_10gb",
        "FlashAttention2ForCausalLM",
        "brand=tesla,driver>=470,driver<471",
    ],
)
def test_masked_shows_paths_names_and_digests(value: str) -> None:
    assert masked("SETTING", value) == value


def test_masked_names_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert masked("ACME_LICENCE", "hunter2") == "hunter2"
    monkeypatch.setenv(MASK_VARIABLE, "acme_*, SITE")
    assert masked("ACME_LICENCE", "hunter2") == MASK
    assert masked("OTHER", "acme_licence=hunter2") == f"acme_licence={MASK}"
    assert masked("SITE", "hunter2") == MASK
    assert masked("SITES", "hunter2") == "hunter2"


def test_masked_command_hides_the_values_of_options() -> None:
    command = [
        "train.py",
        "--api-key",
        "hunter2",
        "--hf-token=hunter2",
        "--env",
        "MY_CREDS=hunter2",
        "--lr",
        "1e-5",
    ]
    assert (
        masked_command(command)
        == f"train.py --api-key {MASK} --hf-token={MASK} --env MY_CREDS={MASK} --lr 1e-5"
    )


def test_forwarding_report() -> None:
    report = forwarding_report(
        {"WANDB_API_KEY": "abc", "MINE": "http://a:b@c", "NCCL_DEBUG": "INFO", "RANK": "0"}
    )
    assert [(row.name, row.value, row.reach) for row in report] == [
        ("MINE", f"http://{MASK}@c", "nowhere"),
        ("NCCL_DEBUG", "INFO", "everywhere"),
        ("RANK", "0", "nowhere"),
        ("WANDB_API_KEY", MASK, "everywhere"),
    ]
    assert "env_vars" in report[0].rule
    assert "NCCL_*" in report[1].rule
    assert "process group" in report[2].rule
