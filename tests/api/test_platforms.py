"""The platform: found late, by the process that uses it, and never on another kind than was asked for."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import cloudpickle
import numpy
import pytest
import torch

from helmsman.api import platforms
from helmsman.api.errors import DeviceMismatchError, PlatformError, PlatformPicklingError
from helmsman.api.platforms import PLATFORM_ENV_VAR, PLATFORMS, CurrentPlatform, DeviceGrant, MemoryStats, current_platform


class FakeRuntime:
    """What torch.cuda and torch.npu have in common, at torch's boundary."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.calls: list[Any] = []

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def set_device(self, device: Any) -> None:
        self.calls.append(("set_device", device))

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def mem_get_info(self) -> tuple[int, int]:
        return 60, 80

    def memory_allocated(self) -> int:
        return 10

    def memory_reserved(self) -> int:
        return 20

    def max_memory_allocated(self) -> int:
        return 15


class FakeTorch(ModuleType):
    """A torch with that many devices of each kind."""

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
    for name in (PLATFORM_ENV_VAR, *(info.visibility_env_var for info in PLATFORMS.values() if info.visibility_env_var)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def platform() -> Iterator[CurrentPlatform]:
    """The platform of a process that has just started; the random states that it may set are put back."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield CurrentPlatform()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def install(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, npu: int | None = None) -> FakeTorch:
    """Put a fake torch in place, with torch_npu (which adds torch.npu) when ``npu`` is a number."""
    fake = FakeTorch(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch_npu", None if npu is None else ModuleType("torch_npu"))
    if npu is not None:
        fake.npu = FakeRuntime(npu)  # type: ignore[attr-defined]
    return fake


# --- the table, which a driver may read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("cpu", ("cpu", "", "CPU", "gloo")),
        ("cuda", ("cuda", "CUDA_VISIBLE_DEVICES", "GPU", "nccl")),
        ("npu", ("npu", "ASCEND_RT_VISIBLE_DEVICES", "NPU", "hccl")),
    ],
)
def test_table_of_kinds(name: str, facts: tuple[str, ...]) -> None:
    info = PLATFORMS[name]
    assert (info.device_type, info.visibility_env_var, info.ray_resource, info.communication_backend) == facts
    assert pickle.loads(pickle.dumps(info)) == info


def test_reading_the_table_resolves_nothing_and_loads_no_torch() -> None:
    code = (
        "import sys; from helmsman.api import platforms as p; p.PLATFORMS['cuda'].ray_resource; p.current_platform.seed(1)\n"
        "assert not p.current_platform.is_resolved() and 'not resolved' in repr(p.current_platform)\n"
        "assert not {'torch', 'numpy', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- which kind -------------------------------------------------------------------------------------------------------


def test_cpu_for_real(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    assert not platform.is_resolved()
    assert platform.name == platform.device_type == "cpu"
    assert platform.is_resolved()
    assert (platform.visibility_env_var, platform.ray_resource, platform.communication_backend) == ("", "CPU", "gloo")
    assert platform.device() == platform.device(3) == torch.device("cpu")
    assert platform.device_count() == 1
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    assert platform.memory_stats() == MemoryStats()
    assert repr(platform) == "<current_platform: cpu>"


@pytest.mark.parametrize(("cuda", "npu", "kind"), [(2, None, "cuda"), (0, 2, "npu"), (2, 2, "cuda"), (0, 0, "cpu")])
def test_kind_is_what_torch_counts(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, cuda: int, npu: int | None, kind: str
) -> None:
    install(monkeypatch, cuda=cuda, npu=npu)
    assert platform.name == kind


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_accelerator_is_driven_through_its_runtime(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fake = install(monkeypatch, cuda=2 * (kind == "cuda"), npu=2 if kind == "npu" else None)
    runtime = getattr(fake, kind)
    assert cast(Any, platform.device(1)) == (kind, 1)
    assert platform.device_count() == 2
    platform.set_device(1)
    platform.synchronize()
    platform.empty_cache()
    assert runtime.calls == [("set_device", (kind, 1)), "synchronize", "empty_cache"]
    assert platform.memory_stats() == MemoryStats(
        allocated_bytes=10, reserved_bytes=20, peak_allocated_bytes=15, free_bytes=60, total_bytes=80
    )


@pytest.mark.parametrize("index", [2, -1])
def test_device_beyond_the_mask_is_an_error(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    install(monkeypatch, cuda=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(PlatformError, match=rf"cuda device {index} .*counts 2, under CUDA_VISIBLE_DEVICES='4,5'.*gpu="):
        platform.set_device(index)


@pytest.mark.parametrize(("kind", "npu"), [("cuda", 1), ("npu", 1), ("cpu", 1), ("cpu", None)])
def test_forced_kind_wins(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, kind: str, npu: int | None) -> None:
    install(monkeypatch, cuda=1, npu=npu)
    monkeypatch.setenv(PLATFORM_ENV_VAR, f" {kind.upper()} ")
    assert platform.name == kind


@pytest.mark.parametrize("kind", ["cuda", "npu"])
@pytest.mark.parametrize("mask", ["4,5", None])
def test_forced_kind_that_is_not_there_is_an_error_and_never_a_cpu_run(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, kind: str, mask: str | None
) -> None:
    install(monkeypatch, npu=0)
    variable = PLATFORMS[kind].visibility_env_var
    if mask:
        monkeypatch.setenv(variable, mask)
    monkeypatch.setenv(PLATFORM_ENV_VAR, kind)
    with pytest.raises(PlatformError, match=f"asks for {kind}, but torch 2.99.0 counts 0") as raised:
        _ = platform.device_type
    assert (f"{variable}='4,5'" if mask else f"{variable} unset") in str(raised.value)
    assert f"{PLATFORM_ENV_VAR}=cpu" in str(raised.value)
    assert not platform.is_resolved()


def test_forced_npu_without_torch_npu_names_the_command(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, npu=None)
    monkeypatch.setenv(PLATFORM_ENV_VAR, "npu")
    with pytest.raises(PlatformError, match="'torch_npu', which cannot be imported.*pip install torch_npu"):
        _ = platform.name


def test_forced_cuda_without_torch_names_the_command(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cuda")
    with pytest.raises(PlatformError, match=r"pip install 'helmsman\[torch\]'"):
        _ = platform.name


def test_without_torch_the_kind_is_cpu_and_only_devices_fail(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert platform.name == "cpu"
    platform.seed(1)
    platform.empty_cache()
    with pytest.raises(PlatformError, match=r"a torch.device needs .*pip install 'helmsman\[torch\]'"):
        platform.device()


def test_unknown_forced_kind_lists_the_kinds(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV_VAR, "tpu")
    with pytest.raises(PlatformError, match="HELMSMAN_PLATFORM is 'tpu'; set it to one of: cpu, cuda, npu"):
        _ = platform.name


@pytest.mark.parametrize(("mask", "warned"), [("0,1", True), ("", False), ("-1", False), ("NoDevFiles", False)])
def test_mask_without_its_devices_is_logged(
    platform: CurrentPlatform,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mask: str,
    warned: bool,
) -> None:
    install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert platform.name == "cpu"
    assert ("running on cpu although CUDA_VISIBLE_DEVICES='0,1'" in caplog.text) is warned


def test_mask_set_before_first_use_counts(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, cuda=1)
    fake.cuda.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))  # type: ignore[method-assign]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert platform.device_count() == 3


def test_kind_is_fixed_once_found(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cuda=1)
    assert platform.name == "cuda"
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    assert platform.name == "cuda"


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_seed_repeats_random_numpy_and_torch(platform: CurrentPlatform) -> None:
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
def test_any_integer_is_a_seed(platform: CurrentPlatform, seed: int) -> None:
    platform.seed(seed)


def test_seed_does_not_resolve(platform: CurrentPlatform) -> None:
    platform.seed(7)
    assert not platform.is_resolved()


def test_torch_that_is_loaded_by_resolving_is_seeded_then_and_nothing_is_rewound(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    platform.seed(7)
    drawn = random.random()
    fake = install(monkeypatch, cuda=1)
    assert platform.name == "cuda"
    assert fake.seeds == [7]
    assert random.random() != drawn
    _ = platform.device_type
    assert fake.seeds == [7]


# --- who may use it ---------------------------------------------------------------------------------------------------


def test_forbidden_process_is_told_why(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    with platform.forbid("it drives a RayScheduler"):
        with pytest.raises(PlatformError, match="it drives a RayScheduler.*inside an engine.*PLATFORMS"):
            _ = platform.name
        assert not platform.is_resolved()
        platform.seed(1)
    assert platform.name == "cpu"


def test_inline_engines_lift_every_prohibition_while_they_run(
    platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    with platform.forbid("first"):
        inline = platform.allow()
        with platform.forbid("second"):
            inline.close()
            inline.close()
            with pytest.raises(PlatformError, match="second"):
                _ = platform.name
            with platform.allow(), platform.allow():
                assert platform.name == "cpu"


def test_functions_of_the_module_act_on_this_process() -> None:
    with platforms.forbid_in_this_process("a"), platforms.allow_in_this_process():
        assert current_platform._forbidden == ["a"]
        assert current_platform._num_allowed == 1
    assert not current_platform._forbidden
    assert current_platform._num_allowed == 0


def test_forked_child_finds_its_own_platform() -> None:
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


# --- pickling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate",
    [
        pickle.dumps,
        cloudpickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda value: pickle.dumps(value, 0),
        lambda value: pickle.dumps({"config": [value]}),
        lambda value: copy.deepcopy([value]),
    ],
    ids=["pickle", "cloudpickle", "copy", "deepcopy", "pickle protocol 0", "pickle nested", "deepcopy nested"],
)
def test_it_cannot_leave_its_process(duplicate: Callable[[CurrentPlatform], object]) -> None:
    with pytest.raises(PlatformPicklingError, match="not resolved.*current_platform inside the worker"):
        duplicate(CurrentPlatform())


def test_pickling_error_names_the_kind_and_resolves_nothing(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlatformPicklingError):
        pickle.dumps(platform)
    assert not platform.is_resolved()
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    _ = platform.name
    with pytest.raises(TypeError, match=r"the platform \(cpu\) cannot be pickled"):
        pickle.dumps(SimpleNamespace(platform=platform))


def test_class_sent_by_value_that_uses_it_is_refused_with_the_way_out() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "current_platform": current_platform}
    exec("def use():\n    return current_platform.name", namespace)
    with pytest.raises(PlatformPicklingError, match="helmsman.api.platforms.current_platform inside the worker"):
        cloudpickle.dumps(namespace["use"])


# --- what was granted ---------------------------------------------------------------------------------------------------

MASKS = {name: info.visibility_env_var for name, info in PLATFORMS.items() if info.visibility_env_var}


def grant(kind: str, *ids: str) -> DeviceGrant:
    return DeviceGrant(worker_id="train/3", kind=kind, ids=ids)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_what_was_granted_is_there(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    install(monkeypatch, cuda=2 if kind == "cuda" else 0, npu=2 if kind == "npu" else 0)
    platform.expect(grant(kind, "4", "GPU-7"))
    assert not platform.is_resolved()
    monkeypatch.setenv(MASKS[kind], "4,GPU-7")
    assert platform.name == kind
    assert platform.device_count() == 2


def test_nothing_was_granted_and_nothing_is_seen(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    platform.expect(grant(""))
    assert platform.name == "cpu"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
@pytest.mark.parametrize(
    ("mask", "num_devices", "facts"),
    [
        ("4,5", 0, ["which would run on the CPU", "its driver works on this node", "HELMSMAN_PLATFORM=cpu"]),
        ("4,5", 1, ["counts 1", "exist on the node"]),
        ("4", 1, ["counts 1", "the scheduler sets it"]),
        ("0,1", 2, ["counts 2", "the scheduler sets it"]),
        ("5,4", 2, ["counts 2", "the scheduler sets it"]),
        (None, 8, ["unset", "counts 8", "the scheduler sets it"]),
        ("", 0, ["=''", "which would run on the CPU"]),
    ],
)
def test_other_devices_than_were_granted_are_an_error(
    platform: CurrentPlatform,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mask: str | None,
    num_devices: int,
    facts: list[str],
) -> None:
    install(monkeypatch, cuda=num_devices if kind == "cuda" else 0, npu=num_devices if kind == "npu" else 0)
    if mask is not None:
        monkeypatch.setenv(MASKS[kind], mask)
    platform.expect(grant(kind, "4", "5"))
    with pytest.raises(DeviceMismatchError) as caught:
        _ = platform.name
    for fact in ("train/3", f"granted {kind} 4,5", MASKS[kind], *facts):
        assert fact in str(caught.value)
    with pytest.raises(DeviceMismatchError):
        platform.device()  # it stays an error


def test_devices_that_nobody_granted_are_an_error(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cuda=8)
    platform.expect(grant(""))
    with pytest.raises(DeviceMismatchError, match=r"granted no accelerator; .*counts 8 cuda.*SchedulingSpec\(gpu="):
        _ = platform.name


def test_a_granted_npu_without_torch_npu_names_the_command(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cuda=8, npu=None)
    platform.expect(grant("npu", "0"))
    with pytest.raises(PlatformError, match="pip install torch_npu"):
        _ = platform.name


def test_a_cpu_run_on_purpose_is_not_checked(platform: CurrentPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setenv(PLATFORM_ENV_VAR, "cpu")
    platform.expect(grant("cuda", "0", "1"))
    assert platform.name == "cpu"
