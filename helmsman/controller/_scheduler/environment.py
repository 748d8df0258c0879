"""A worker's environment as a pure function of the driver's.

A forked worker inherits every variable, and a cluster worker none. Both are wrong. With the
driver's device mask, rank or address another process can hang. Without the driver's NCCL_DEBUG, a
user who has set it sees no effect. The lists below decide, and ``SchedulingSpec.env_vars``
overrides them.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from helmsman._process.guardian import TAG_VARIABLE
from helmsman._process.ports import PORTS_VARIABLE
from helmsman._wire.group_keys import KEY_VARIABLE
from helmsman.api.environment import EnvironmentVariable, masked
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import SchedulingSpec

Reach = Literal["everywhere", "this machine", "nowhere"]

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "RAYON_NUM_THREADS",  # Hugging Face's tokenizers
)
"""Set from ``SchedulingSpec.cpu``; otherwise each library in every worker uses all cores of the
node.
"""


_MASKS = " ".join(info.visibility_env_var for info in PLATFORMS.values())

_RULES: tuple[tuple[Reach, Mapping[str, str]], ...] = (
    (
        "this machine",
        {"the devices that ROCm numbers from 0, below other masks": "ROCR_VISIBLE_DEVICES"},
    ),
    (
        "nowhere",
        {
            "a device mask of the driver; each worker has its own": f"{_MASKS} *_VISIBLE_DEVICES "
            "ASCEND_DEVICE_ID DEVICE_ID "
            "GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK ONEAPI_DEVICE_SELECTOR TPU_VISIBLE_CHIPS "
            "NEURON_RT_VISIBLE_CORES "
            "HABANA_VISIBLE_MODULES",
            "the driver's place in a process group; a worker is given its own": "RANK WORLD_SIZE "
            "LOCAL_RANK LOCAL_WORLD_SIZE "
            "NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
            "MASTER_ADDR MASTER_PORT RANK_ID "
            "RANK_SIZE RANK_TABLE_FILE VLLM_PORT VLLM_HOST_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL "
            "VLLM_DP_SIZE "
            "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT NCCL_COMM_ID",
            "a thread count; it follows SchedulingSpec.cpu": " ".join(THREAD_VARIABLES),
            "a mark of one worker": f"{TAG_VARIABLE} HELMSMAN_INSTANCE_DEVICES {PORTS_VARIABLE} "
            f"{KEY_VARIABLE}",
            "torchrun's own": "TORCHELASTIC_* PET_*",
            "Ray's own; its workers have theirs from their raylet": "RAY_*",
        },
    ),
    (
        "this machine",
        {
            # Required to run a program at all; other nodes have their own values.
            "the user's session": "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TERM "
            "HOSTNAME PWD",
            "folders of this machine": "TMPDIR TEMP TMP XDG_CACHE_HOME XDG_CONFIG_HOME "
            "XDG_RUNTIME_DIR",
            "where programs are here": "LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHOME "
            "VIRTUAL_ENV CONDA_PREFIX",
            "compilers of this machine": "CC CXX CPATH C_INCLUDE_PATH LIBRARY_PATH MAX_JOBS",
            "where CUDA is here": "CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDNN_HOME "
            "CUDA_MPS_PIPE_DIRECTORY "
            "CUDA_MPS_LOG_DIRECTORY",
            "where CANN is here": "ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH "
            "ASCEND_AICPU_PATH "
            "ASCEND_CUSTOM_OPP_PATH",
            # A proxy and its certificates belong to a network, which other nodes may not share.
            "the network of this machine": "http_proxy https_proxy ftp_proxy all_proxy no_proxy "
            "HTTP_PROXY HTTPS_PROXY "
            "FTP_PROXY ALL_PROXY NO_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
            "CURL_CA_BUNDLE",
            # On another node they would misdirect its process group.
            "the address of this machine": "HCCL_IF_IP VLLM_HOST_IP SGLANG_HOST_IP SGL_HOST_IP "
            "HOST_IP NCCL_HOSTID",
        },
    ),
    (
        "everywhere",
        {
            # Read at interpreter start, so programs that an engine launches receive them too.
            "Python's switches": "PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTHONWARNINGS "
            "PYTHONDONTWRITEBYTECODE PYTHONHASHSEED",
            "switches of torch_npu": "TASK_QUEUE_ENABLE INF_NAN_MODE_ENABLE COMBINED_ENABLE "
            "MULTI_STREAM_MEMORY_REUSE "
            "CPU_AFFINITY_CONF",
            "communication": "NCCL_* HCCL_* GLOO_* UCX_* NVSHMEM_* TENSORPIPE_*",
            "torch and its compilers": "TORCH_* PYTORCH_* TORCHINDUCTOR_* TORCHDYNAMO_* TRITON_* "
            "NVTE_*",
            "CUDA and its libraries": "CUDA_* CUBLAS_* CUDNN_*",
            "CANN and torch_npu": "ASCEND_* ACL_* ATB_*",
            "how libraries compute": "OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NVPL_*",
            "models and data": "HF_* TRANSFORMERS_* TOKENIZERS_* DATASETS_* SAFETENSORS_* "
            "MODELSCOPE_*",
            "inference engines": "VLLM_* SGLANG_* SGL_* FLASHINFER_* FLASH_ATTENTION_* LMCACHE_*",
            "experiment trackers": "WANDB_* MLFLOW_* SWANLAB_* TENSORBOARD_*",
            "Helmsman": "HELMSMAN_*",
        },
    ),
)
"""Shell patterns of names by reach and rule; the first match decides."""


class Forwarding(NamedTuple):
    reach: Reach
    rule: str


class ForwardedVariable(msgspec.Struct, frozen=True, kw_only=True):
    """The forwarding of one shell variable; a row of ``helmsman env``."""

    name: str
    value: str
    """Value with secrets masked."""
    reach: Reach
    """'everywhere': every worker; 'this machine': only workers of LocalScheduler, since other nodes
    have their own; 'nowhere': no worker.
    """
    rule: str


@functools.lru_cache(maxsize=4096)
def forwarding_of(name: str) -> Forwarding:
    """Return the forwarding rule of a driver variable."""
    for reach, rules in _RULES:
        for rule, patterns in rules.items():
            for pattern in patterns.split():
                if fnmatch.fnmatchcase(name, pattern):
                    return Forwarding(reach, f"{rule} ({pattern})" if "*" in pattern else rule)
    return Forwarding("nowhere", "on no list; SchedulingSpec.env_vars sends it")


def forwarding_report(environ: Mapping[str, str]) -> list[ForwardedVariable]:
    """Return the forwarding of each variable of a shell, sorted by name, secrets masked."""
    return [
        ForwardedVariable(name=name, value=masked(name, value), reach=way.reach, rule=way.rule)
        for name, value in sorted(environ.items())
        for way in (forwarding_of(name),)
    ]


def worker_environment(
    environ: Mapping[str, str],
    spec: SchedulingSpec,
    devices: Mapping[str, str],
    *,
    same_machine: bool,
) -> list[EnvironmentVariable]:
    """Return the variables that are set in a worker, sorted by name.

    ``devices`` has its device masks and other variables of its scheduler. With ``same_machine`` the
    worker inherits nothing, so the result includes the variables that local programs need.
    """
    reaches = ("everywhere", "this machine") if same_machine else ("everywhere",)
    forwarded = {
        name: value for name, value in environ.items() if forwarding_of(name).reach in reaches
    }
    threads = dict.fromkeys(THREAD_VARIABLES, _thread_count(spec))
    layers = (
        ("default", short_spin({**environ, **spec.env_vars})),
        ("driver", forwarded),
        ("cpu count", threads),
        ("devices", devices),
        ("spec.env_vars", spec.env_vars),
    )
    variables = {
        name: EnvironmentVariable(name, value, source)
        for source, layer in layers
        for name, value in layer.items()
    }
    return [variables[name] for name in sorted(variables)]


def short_spin(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for short waits of OpenMP's threads, unless the environment decides.

    By default they spin for about a millisecond at each barrier, which takes the cores of a busy
    machine from the threads that they wait for: two training runs side by side on two cores took
    55 s each, and 13 s with this setting; a run alone takes the same time. libgomp reads the
    variables when it is loaded, so forkservers need them, too.
    """
    is_set = environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    return {} if is_set else {"GOMP_SPINCOUNT": "1000"}


def _thread_count(spec: SchedulingSpec) -> str:
    """Return the spec's OMP_NUM_THREADS or CPUs; torch takes MKL's count for its own."""
    # Later entries are for nested levels.
    own = spec.env_vars.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return own if own.isdecimal() else str(max(1, int(spec.cpu)))


def as_mapping(variables: Iterable[EnvironmentVariable]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables}
