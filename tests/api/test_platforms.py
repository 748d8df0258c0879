"""Test that a process resolves its platform on first use, to the requested kind or an error."""

from __future__ import annotations

import functools
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import cloudpickle
import numpy
import pytest
import torch

from helmsman.api.errors import DeviceMismatchError, PlatformError
from helmsman.api.platforms import (
    PLATFORM_ENV_VAR,
    PLATFORMS,
    CurrentPlatform,
    DeviceGrant,
    MemoryStats,
    current_platform,
)


class FakeRuntime:
    """A fake of the functions that torch.cuda and torch.npu share."""

    def __init__(self, num_devices: int) -> None:
        self.calls: list[Any] = []
        self.is_available = lambda: num_devices > 0
        self.device_count = lambda: num_devices
        self.set_device = lambda device: self.calls.append(("set_device", device))
        self.synchronize = lambda: self.calls.append("synchronize")
        self.empty_cache = lambda: self.calls.append("empty_cache")
        self.mem_get_info = lambda: (60, 80)
        self.memory_allocated = lambda: 10
        self.memory_reserved = lambda: 20
        self.max_memory_allocated = lambda: 15


class FakeTorch(ModuleType):
    """A fake torch with a number of devices of each kind."""

    def __init__(self, *, cuda: int = 0) -> None:
        super().__init__("torch")
        self.__version__ = "2.99.0"
        self.cuda = FakeRuntime(cuda)
        self.seeds: list[int] = []

    def device(self, kind: str, index: int | None = None) -> tuple[str, int | None]:
        return kind, index

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


@pytest.fixture(autouse=True)
def environment_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        PLATFORM_ENV_VAR,
        *(info.visibility_env_var for info in PLATFORMS.values() if info.visibility_env_var),
    ):
        monkeypatch.delenv(name, raising=False)


class Process(CurrentPlatform):
    """The platform of a fresh process on a machine whose devices the test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.setenv = monkeypatch.setenv
        self.set_module: Callable[[str, ModuleType | None], None] = functools.partial(
            monkeypatch.setitem, sys.modules
        )  # type: ignore[arg-type]

    def install(self, *, cuda: int = 0, npu: int | None = None) -> FakeTorch:
        """Put a fake torch in place, with torch_npu (which adds torch.npu) when ``npu`` is a
        number.
        """
        fake = FakeTorch(cuda=cuda)
        self.set_module("torch", fake)
        self.set_module("torch_npu", None if npu is None else ModuleType("torch_npu"))
        if npu is not None:
            fake.npu = FakeRuntime(npu)  # type: ignore[attr-defined]
        return fake


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Yield a fresh platform, and restore the random states that it may set."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield Process(monkeypatch)
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


# --- the table, which a driver may read -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("cpu", ("cpu", "", "CPU", "gloo")),
        ("cuda", ("cuda", "CUDA_VISIBLE_DEVICES", "GPU", "nccl")),
        ("rocm", ("cuda", "HIP_VISIBLE_DEVICES", "GPU", "nccl")),
        ("npu", ("npu", "ASCEND_RT_VISIBLE_DEVICES", "NPU", "hccl")),
    ],
)
def test_table_of_kinds(name: str, facts: tuple[str, ...]) -> None:
    info = PLATFORMS[name]
    assert (
        info.device_type,
        info.visibility_env_var,
        info.ray_resource,
        info.communication_backend,
    ) == facts
    assert pickle.loads(pickle.dumps(info)) == info


def test_table_loads_no_torch() -> None:
    code = (
        "import sys; from helmsman.api import platforms as p; p.PLATFORMS['cuda'].ray_resource; "
        "p.current_platform.seed(1)\n"
        "assert not p.current_platform.is_resolved() and 'not resolved' in "
        "repr(p.current_platform)\n"
        "assert not {'torch', 'numpy', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- kind -----------------------------------------------------------------------------------------


def test_platform_cpu_for_real(platform: Process) -> None:
    platform.setenv(PLATFORM_ENV_VAR, "cpu")
    assert not platform.is_resolved()
    assert platform.name == platform.device_type == "cpu"
    assert platform.is_resolved()
    assert (platform.visibility_env_var, platform.ray_resource, platform.communication_backend) == (
        "",
        "CPU",
        "gloo",
    )
    assert platform.device() == platform.device(3) == torch.device("cpu")
    assert platform.device_count() == 1
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    assert platform.memory_stats() == MemoryStats()
    assert repr(platform) == "<current_platform: cpu>"


@pytest.mark.parametrize(
    ("cuda", "npu", "forced", "kind"),
    [
        *((2, None, "", "cuda"), (0, 2, "", "npu"), (2, 2, "", "cuda"), (0, 0, "", "cpu")),
        *(
            (1, 1, "cuda", "cuda"),
            (1, 1, "npu", "npu"),
            (1, 1, "cpu", "cpu"),
            (1, None, "cpu", "cpu"),
        ),
    ],
)
def test_platform_kind(
    platform: Process, cuda: int, npu: int | None, forced: str, kind: str
) -> None:
    """The kind follows the devices that torch counts, unless it is forced, and stays fixed."""
    platform.install(cuda=cuda, npu=npu)
    platform.setenv(PLATFORM_ENV_VAR, f" {forced.upper()} ")
    assert platform.name == kind
    platform.setenv(PLATFORM_ENV_VAR, "cpu")
    assert platform.name == kind


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_platform_drives_the_runtime(platform: Process, kind: str) -> None:
    runtime = getattr(
        platform.install(cuda=2 * (kind == "cuda"), npu=2 if kind == "npu" else None), kind
    )
    assert cast(Any, platform.device(1)) == (kind, 1)
    assert platform.device_count() == 2
    platform.set_device(1)
    platform.synchronize()
    platform.empty_cache()
    assert runtime.calls == [("set_device", (kind, 1)), "synchronize", "empty_cache"]
    stats = platform.memory_stats()
    assert (
        stats.device,
        stats.allocated_bytes,
        stats.reserved_bytes,
        stats.peak_allocated_bytes,
    ) == (kind, 10, 20, 15)
    assert (stats.free_bytes, stats.total_bytes) == (60, 80)


@pytest.mark.parametrize("index", [2, -1])
def test_set_device_beyond_mask(platform: Process, index: int) -> None:
    platform.install(cuda=2)
    platform.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        PlatformError,
        match=rf"cuda device {index} .*counts 2, under CUDA_VISIBLE_DEVICES='4,5'.*gpu=",
    ):
        platform.set_device(index)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
@pytest.mark.parametrize("mask", ["4,5", None])
def test_forced_kind_without_devices(platform: Process, kind: str, mask: str | None) -> None:
    """A forced kind without devices raises, and does not fall back to the CPU."""
    platform.install(npu=0)
    variable = PLATFORMS[kind].visibility_env_var
    if mask:
        platform.setenv(variable, mask)
    platform.setenv(PLATFORM_ENV_VAR, kind)
    with pytest.raises(
        PlatformError, match=f"asks for {kind}, but torch 2.99.0 counts 0"
    ) as raised:
        _ = platform.device_type
    assert (f"{variable}='4,5'" if mask else f"{variable} unset") in str(raised.value)
    assert f"{PLATFORM_ENV_VAR}=cpu" in str(raised.value)
    assert not platform.is_resolved()


@pytest.mark.parametrize(
    ("forced", "has_torch", "message"),
    [
        ("npu", True, "'torch_npu', which cannot be imported.*pip install torch_npu"),
        ("cuda", False, r"pip install 'helmsman-rl\[torch\]'"),
        ("tpu", True, "HELMSMAN_PLATFORM is 'tpu'; set it to one of: cpu, cuda, rocm, npu"),
    ],
)
def test_forced_kind_names_the_step(
    platform: Process, forced: str, has_torch: bool, message: str
) -> None:
    platform.install()
    if not has_torch:
        platform.set_module("torch", None)
    platform.setenv(PLATFORM_ENV_VAR, forced)
    with pytest.raises(PlatformError, match=message):
        _ = platform.name


def test_platform_without_torch_is_cpu(platform: Process) -> None:
    """Without torch, the platform is the CPU, and only device() raises."""
    platform.set_module("torch", None)
    assert platform.name == "cpu"
    platform.seed(1)
    platform.empty_cache()
    with pytest.raises(
        PlatformError, match=r"a torch.device needs .*pip install 'helmsman-rl\[torch\]'"
    ):
        platform.device()


@pytest.mark.parametrize(
    ("mask", "warned"), [("0,1", True), ("", False), ("-1", False), ("NoDevFiles", False)]
)
def test_platform_mask_without_devices_logged(
    platform: Process, caplog: pytest.LogCaptureFixture, mask: str, warned: bool
) -> None:
    platform.install()
    platform.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert platform.name == "cpu"
    assert ("running on cpu although CUDA_VISIBLE_DEVICES='0,1'" in caplog.text) is warned


def test_platform_mask_before_first_use(platform: Process) -> None:
    platform.install(cuda=1).cuda.device_count = lambda: len(
        os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    )
    platform.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert platform.device_count() == 3


# --- seeds ----------------------------------------------------------------------------------------


def test_seed_repeats(platform: Process) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    platform.seed(7)
    first = draw()
    platform.seed(8)
    other = draw()
    platform.seed(7)
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", [0, 2**32 + 1, 2**70, -1])
def test_seed_any_integer(platform: Process, seed: int) -> None:
    platform.seed(seed)
    assert not platform.is_resolved()


def test_seed_applied_when_torch_loads(platform: Process) -> None:
    """torch is seeded when it loads, and other random states are not reset."""
    platform.set_module("torch", None)
    platform.seed(7)
    drawn = random.random()
    fake = platform.install(cuda=1)
    assert platform.name == "cuda"
    assert fake.seeds == [7]
    assert random.random() != drawn
    _ = platform.device_type
    assert fake.seeds == [7]


# --- prohibition ----------------------------------------------------------------------------------


def test_forbid_and_allow(platform: Process) -> None:
    """allow() suspends all prohibitions, as engines of an inline scheduler do while they run."""
    platform.setenv(PLATFORM_ENV_VAR, "cpu")
    with platform.forbid("first"):
        inline = platform.allow()
        with platform.forbid("it drives a RayScheduler"):
            inline.close()
            inline.close()
            with pytest.raises(
                PlatformError, match="it drives a RayScheduler.*inside an engine.*PLATFORMS"
            ):
                _ = platform.name
            platform.seed(1)
            assert not platform.is_resolved()
            with platform.allow(), platform.allow():
                assert platform.name == "cpu"


def test_platform_of_a_forked_child() -> None:
    code = """
import os
os.environ["HELMSMAN_PLATFORM"] = "cpu"
from helmsman.api.platforms import current_platform as p
assert p.name == "cpu"
p.forbid("the parent is a driver")
os.environ["HELMSMAN_PLATFORM"] = "nonsense"
pid = os.fork()
if pid == 0:
    try:
        p.name
    except Exception as exc:
        os._exit(0 if "'nonsense'" in str(exc) and not p.is_resolved() else 1)
    os._exit(2)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert p.is_resolved()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- pickling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_platform_is_pickled_by_name(dumps: Callable[[object], bytes]) -> None:
    """A process that loads it gets its own platform, and not the resolution of another process."""
    code = (
        "import pickle, sys; loaded = pickle.load(sys.stdin.buffer)\n"
        "from helmsman import current_platform\n"
        "print(loaded is current_platform, loaded.is_resolved())"
    )
    assert current_platform.name == "cpu"
    loaded = subprocess.run(
        [sys.executable, "-c", code], input=dumps(current_platform), capture_output=True, check=True
    )
    assert loaded.stdout.split() == [b"True", b"False"], loaded


def test_engine_of_a_script_uses_the_platform() -> None:
    """A function sent by value refers to the platform of the process that loads it."""
    namespace: dict[str, Any] = {"__name__": "__main__", "current_platform": current_platform}
    exec("def use():\n    return current_platform", namespace)
    assert pickle.loads(cloudpickle.dumps(namespace["use"]))() is current_platform


# --- what was granted -----------------------------------------------------------------------------

MASKS = {
    name: info.visibility_env_var for name, info in PLATFORMS.items() if info.visibility_env_var
}


def grant(kind: str, *ids: str) -> DeviceGrant:
    return DeviceGrant(worker_id="train/3", kind=kind, ids=ids)


def test_expect_grant_of_rocm(platform: Process) -> None:
    """A GPU is granted as cuda."""
    platform.install(cuda=1)
    platform.expect(grant("cuda", "1"))
    platform.setenv(MASKS["cuda"], "1")
    platform.setenv(PLATFORM_ENV_VAR, "rocm")
    assert (platform.name, platform.device_type) == ("rocm", "cuda")


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_expect_grant_present(platform: Process, kind: str) -> None:
    platform.install(cuda=2 if kind == "cuda" else 0, npu=2 if kind == "npu" else 0)
    platform.expect(grant(kind, "4", "GPU-7"))
    assert not platform.is_resolved()
    platform.setenv(MASKS[kind], "4,GPU-7")
    assert platform.name == kind
    assert platform.device_count() == 2


@pytest.mark.parametrize("kind", ["cuda", "npu"])
@pytest.mark.parametrize(
    ("mask", "num_devices", "facts"),
    [
        (
            "4,5",
            0,
            [
                "which would run on the CPU",
                "its driver works on this node",
                "HELMSMAN_PLATFORM=cpu",
            ],
        ),
        ("4,5", 1, ["counts 1", "exist on the node"]),
        ("4", 1, ["counts 1", "the scheduler sets it"]),
        ("0,1", 2, ["counts 2", "the scheduler sets it"]),
        ("5,4", 2, ["counts 2", "the scheduler sets it"]),
        (None, 8, ["unset", "counts 8", "the scheduler sets it"]),
        ("", 0, ["=''", "which would run on the CPU"]),
    ],
)
def test_expect_grant_of_other_devices(
    platform: Process, kind: str, mask: str | None, num_devices: int, facts: list[str]
) -> None:
    platform.install(
        cuda=num_devices if kind == "cuda" else 0, npu=num_devices if kind == "npu" else 0
    )
    if mask is not None:
        platform.setenv(MASKS[kind], mask)
    platform.expect(grant(kind, "4", "5"))
    with pytest.raises(DeviceMismatchError) as caught:
        _ = platform.name
    for fact in ("train/3", f"granted {kind} 4,5", MASKS[kind], *facts):
        assert fact in str(caught.value)
    with pytest.raises(DeviceMismatchError):
        platform.device()  # it stays an error


def test_expect_grant_of_nothing(platform: Process) -> None:
    platform.expect(grant(""))
    platform.install(cuda=8)
    with pytest.raises(
        DeviceMismatchError, match=r"granted no accelerator; .*counts 8 cuda.*SchedulingSpec\(gpu="
    ):
        _ = platform.name
    platform.install()
    assert platform.name == "cpu"


def test_expect_grant_without_torch_npu(platform: Process) -> None:
    platform.install(cuda=8, npu=None)
    platform.expect(grant("npu", "0"))
    with pytest.raises(PlatformError, match="pip install torch_npu"):
        _ = platform.name


def test_expect_grant_with_cpu_forced(platform: Process) -> None:
    platform.install()
    platform.setenv(PLATFORM_ENV_VAR, "cpu")
    platform.expect(grant("cuda", "0", "1"))
    assert platform.name == "cpu"
