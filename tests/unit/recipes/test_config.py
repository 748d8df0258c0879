"""Test the settings of the GRPO recipe: files, command line, validation and documentation."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from helmsman import LocalScheduler
from helmsman.api.plan import Plan
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState
from helmsman.recipes import config
from helmsman.recipes.roles import ENGINES, engine_arguments, make_jobs
from helmsman.recipes.settings import GRPOSettings, SFTSettings
from tests.unit.recipes.data import CONFIGS, settings

FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
DOCS = Path(__file__).parents[3] / "docs" / "recipes.md"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "m"\nsteps = 3\n[data]\ntrain = "t.jsonl"\n[[rewards]]\nuse = "exact"\n'
    )
    return path


@pytest.mark.parametrize("name", FILES)
def test_load_every_file_can_be_placed(name: str) -> None:
    found = settings(name=name)
    cluster = found.cluster
    kind = "NPU" if "npu" in name else "GPU"
    total = {
        "CPU": 64.0,
        "memory": 1e12,
        **({kind: float(cluster.devices_per_node)} if cluster.devices_per_node else {}),
    }
    nodes = tuple(
        NodeState(
            node_id=f"node-{index}",
            address=f"node-{index}",
            total=total,
            available=total,
            labels={},
        )
        for index in range(cluster.num_nodes)
    )
    plan = plan_jobs(ClusterSnapshot(nodes=nodes), make_jobs(found))
    assert isinstance(plan, Plan), plan
    devices = [
        (worker.node, device)
        for role in plan.roles
        if role.target is None
        for worker in role.workers
        for device in worker.devices
    ]
    assert len(devices) == len(set(devices)) == cluster.num_nodes * cluster.devices_per_node, (
        "each device is used once"
    )


def test_load_one_machine_and_many_nodes() -> None:
    one, many = settings(name="one_machine_8gpu.yaml"), settings(name="many_nodes_gpu.yaml")
    assert one.cluster != many.cluster
    assert msgspec.structs.replace(many, cluster=one.cluster) == one


def test_load_unknown_keys(file: Path) -> None:
    file.write_text(file.read_text().replace("steps = 3", "step = 3"))
    with pytest.raises(
        ValueError, match=r"run.toml: there is no setting 'step'; did you mean 'steps'\?"
    ):
        config.load(GRPOSettings, file)


def test_load_missing_key() -> None:
    with pytest.raises(
        ValueError, match=r"data is not given. Set it in the file, by --data, or in"
    ):
        config.load(GRPOSettings, None, [("model", "m")])


def test_load_unknown_key_in_list(file: Path) -> None:
    file.write_text(file.read_text().replace('use = "exact"', 'use = "exact"\nwieght = 2'))
    with pytest.raises(
        ValueError, match=r"there is no setting 'rewards\[0\].wieght'; did you mean 'weight'\?"
    ):
        config.load(GRPOSettings, file)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exact", [("exact", 1.0)]),
        ("exact,my_rewards.py:judge", [("exact", 1.0), ("my_rewards.py:judge", 1.0)]),
        ('["exact", {"use": "number", "weight": 2}]', [("exact", 1.0), ("number", 2.0)]),
    ],
)
def test_load_rewards_by_name(text: str, found: list[tuple[str, float]]) -> None:
    rewards = settings(("rewards", text)).rewards
    assert [(reward.use, reward.weight) for reward in rewards] == found


def test_load_file_with_names(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {train: t}\nrewards: [exact, {use: number}]\n")
    assert [reward.use for reward in config.load(GRPOSettings, file).rewards] == ["exact", "number"]
    file.write_text("model: m\ndata: {train: t}\nagent: my_agent.py:solve\n")
    assert config.load(GRPOSettings, file).agent.use == "my_agent.py:solve"


def test_load_lists() -> None:
    found = settings(("tracking.to", "console,wandb"), ("evaluation.k", "1"))
    assert (found.tracking.to, found.evaluation.k) == (("console", "wandb"), (1,))


def test_load_overrides() -> None:
    found = settings(
        ("train.lr", "3e-6"),
        ("steps", "7"),
        ("data.held_out", "7"),
        ("data.num_held_out", "0"),
        ("check.weights", "true"),
        ("sync.dtype", "null"),
        ("evaluation.k", "[1]"),
        ("train.engine.num_warmup_steps", "5"),
        ("train.engine.compute_dtype", "float32"),
        ("rewards", '[{"use": "number", "weight": 2}]'),
        ("cluster.env_vars.OMP_NUM_THREADS", "4"),
        ("data.system_prompt", '{"answer": "in this form"}'),
    )
    assert (found.train.lr, found.steps, found.data.held_out, found.check.weights) == (
        3e-6,
        7,
        "7",
        True,
    )
    assert found.sync.dtype is None
    assert found.train.engine == {"num_warmup_steps": 5, "compute_dtype": "float32"}
    assert [(reward.use, reward.weight) for reward in found.rewards] == [("number", 2.0)]
    assert found.cluster.env_vars == {"OMP_NUM_THREADS": "4"}
    assert found.data.system_prompt == '{"answer": "in this form"}'


def test_load_origin_of_values(file: Path) -> None:
    for override, message in (
        (("steps", "many"), "^--steps: steps: Expected `int`, got `str`"),
        (
            ("cluster.train_cpus", "-1"),
            "^--cluster.train_cpus: cluster.train_cpus is -1; .* 0 or more",
        ),
        (
            ("train.engine.learning_rate", "1"),
            "^--train.engine.learning_rate: .*unknown field `learning_rate`; did you mean 'lr'",
        ),
        (
            ("train.engine.lora_rank", "16"),
            "^--train.engine.lora_rank: .*unknown field `lora_rank`; did you mean 'lora'",
        ),
        (
            ("train.engine.lora", '{"r": 16, "lora_alpha": 32}'),
            "train.engine.lora: .*unknown field `r`; there are: rank, alpha, targets",
        ),
        (
            ("train.engine.lora", '{"target_modules": ["q_proj"]}'),
            "train.engine.lora: .*unknown field `target_modules`; did you mean 'targets'",
        ),
        (
            ("rewards", '[{"use": "exact"}, {"use": "exact"}]'),
            "run.toml with --rewards: two rewards are called 'exact'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            config.load(GRPOSettings, file, [("train.lr", "1e-6"), override])
    file.write_text(file.read_text().replace("steps = 3", "steps = 0"))
    with pytest.raises(ValueError, match="run.toml: steps is 0; expected 1 or more"):
        config.load(GRPOSettings, file, [("train.lr", "1e-6")])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("steps", "0"), "steps is 0; expected 1 or more"),
        (("samples_per_prompt", "1"), "samples_per_prompt is 1"),
        (("rewards", '[{"use": "exact", "weight": 0}]'), r"rewards\[\].weight is 0 for all; expe"),
        (("train.learning_rate", "1"), "^--train.learning_rate: there is no setting .* 'lr'"),
        (("rollout.temprature", "1"), "'rollout.temprature'; did you mean 'temperature'"),
        (("cluster.placement", "together"), "'together'; expected 'separated' or 'colocated'$"),
        (
            ("train.engine.tensor_parallel_size", "3"),
            "of 3, which does not divide cluster.train_workers, 2",
        ),
        (("train.minibatches", "3"), " is 3; .* divides prompts_per_step, 4"),
        (("evaluation.k", "[2]"), r"evaluation.k is \[2\]; expected 1 to evaluation.samples, 1"),
        (("evaluation.reward", "nothing"), "evaluation.reward is 'nothing'; the rewards are exact"),
        (("cluster.scheduler", "inline"), "cluster.train_workers is 2; expected 1 with sch"),
        (("data.held_out", "other.jsonl"), "data.held_out and data.num_held_out are both given"),
        (
            ("train.engine.gradient_checkpoint", "true"),
            "train.engine: Object contains unknown field `gradient_checkpoint`",
        ),
        (("train.engine.eps", "small"), "train.engine.eps: Expected `float`, got `str`"),
        (
            ("train.engine.head", "reward"),
            "train.engine.head: Invalid enum value 'reward'; expected 'lm' or 'value'",
        ),
        (
            ("sync.dtype", "int3"),
            "sync.dtype: Invalid enum value 'int3'; expected 'float32' or 'bfloat16' or 'float16'",
        ),
        (
            ("algorithm.loss", "grop"),
            "algorithm.loss is 'grop'; expected sft, .*, or a function's import path",
        ),
        (("evaluation.top_p", "0"), "evaluation.top_p is 0; expected more than 0"),
        (
            ("rollout.engine", "vlm"),
            "rollout.engine is 'vlm'; expected vllm, hf, server, recorded, or a class's",
        ),
        (
            ("rewards.use", "math"),
            "--rewards.use: rewards has no keys below it. Give its whole value as JSON.",
        ),
        (
            ("rewards", "[{use: math}]"),
            r"--rewards: '\[\{use: math\}\]' is not valid JSON: JSON is malformed",
        ),
        (
            ("rewards", '[{"use": "exact", "weight": "nan"}]'),
            r"rewards\[0\].weight is nan; expected a finite number",
        ),
        (
            ("evaluation.right_from", "inf"),
            "evaluation.right_from is inf; expected a finite number",
        ),
        (
            ("seed", str(2**64)),
            "seed is 18446744073709551616; expected a number of at most 64 bits",
        ),
        (("cluster.start_timeout_s", "0"), "cluster.start_timeout_s is 0; expected more than 0"),
        (("rollout.top_p", "1.5"), "rollout.top_p is 1.5; expected at most 1"),
        (
            ("rewards", '[{"use": "exact", "processes": 0}]'),
            r"rewards\[0\].processes is 0; .* 1 or",
        ),
        (
            ("train.engine.lr", "1e-3"),
            "train.engine.lr cannot be set here; set train.lr instead",
        ),
    ],
)
def test_load_invalid_values(override: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(override)


def test_load_colocated_placement() -> None:
    colocated = [("cluster.placement", "colocated"), ("cluster.devices_per_node", "8")]
    with pytest.raises(ValueError, match="rollout.staleness is 1"):
        settings(*colocated, ("rollout.staleness", "1"))
    with pytest.raises(ValueError, match="sync.way is 'collective'"):
        settings(*colocated, ("sync.way", "collective"))
    with pytest.raises(
        ValueError,
        match="rollout_devices is 4; expected cluster.train_workers",
    ):
        settings(*colocated, ("cluster.rollout_devices", "2"), ("rollout.engine", "vllm"))
    with pytest.raises(ValueError, match="rollout_devices is 2; expected 1 with rollout.engine 'h"):
        settings(*colocated, ("cluster.rollout_devices", "2"))
    assert (
        engine_arguments(settings(*colocated, ("rollout.engine", "vllm")))["enable_sleep_mode"]
        is True
    )


@pytest.mark.parametrize(
    ("name", "value"), [("teacher_coef", "0.9"), ("teacher_top_k", "8"), ("teacher_workers", "1")]
)
def test_load_settings_of_an_absent_teacher(name: str, value: str) -> None:
    with pytest.raises(
        ValueError, match=rf"algorithm\.{name} is {value} without algorithm\.teacher; expected both"
    ):
        settings((f"algorithm.{name}", value))
    given = {name: json.loads(value)}
    with pytest.raises(ValueError, match=rf" {name} is {value} without teacher; expected both"):
        config.load(SFTSettings, given={"model": "m", "data": {"train": "t"}, **given})


def test_load_workers_of_a_teacher() -> None:
    teacher = [("algorithm.teacher", "t"), ("algorithm.teacher_workers", "3")]
    shared = [("train.engine.tensor_parallel_size", "2"), ("cluster.train_workers", "2")]
    with pytest.raises(ValueError, match=r"of 2, which does not divide algorithm.teacher_workers"):
        settings(*teacher, *shared)
    with pytest.raises(ValueError, match=r"algorithm.teacher_workers is 3; expected 1"):
        settings(*teacher, ("cluster.scheduler", "inline"), ("cluster.train_workers", "1"))
    with pytest.raises(
        ValueError, match=r"algorithm.teacher_workers is 3, .* beside 2 of the other roles; exp"
    ):
        settings(*teacher, ("cluster.devices_per_node", "4"), ("rollout.engine", "vllm"))
    given = {"model": "m", "data": {"train": "t"}, "teacher": "t", "teacher_workers": 2}
    with pytest.raises(
        ValueError, match=r" teacher_workers is 2, .* beside 1 of the other roles; "
    ):
        config.load(SFTSettings, given={**given, "cluster": {"devices_per_node": 2}})


def test_make_jobs_teacher_of_its_own() -> None:
    """Its devices are no other role's, and the others share the rest."""
    eight = ("cluster.scheduler", "local"), ("cluster.devices_per_node", "8")
    teacher = ("algorithm.teacher", "t"), ("rollout.engine", "hf")
    for workers, devices in ((0, ["0", "1"]), (3, ["4", "5", "6"])):
        found = settings(*eight, *teacher, ("algorithm.teacher_workers", str(workers)))
        with LocalScheduler(num_gpus=8) as scheduler:
            roles = {role.role: role for role in scheduler.plan(make_jobs(found)).roles}
        ranks = [rank for each in roles["teacher"].instances for rank in each.workers]
        assert [device for rank in ranks for device in rank.devices] == devices


def test_load_preset() -> None:
    algorithm = settings(
        ("algorithm.preset", "dapo"), ("algorithm.overlong_filter", "false")
    ).algorithm
    assert (algorithm.clip_high, algorithm.aggregation, algorithm.dynamic_sampling) == (
        0.28,
        "token",
        True,
    )
    assert algorithm.overlong_filter is False
    assert settings(("algorithm.preset", "dr_grpo")).algorithm.normalize_std is False


def test_load_yaml_number_without_dot(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: {train: t}\nrewards: [{use: exact}]\ntrain: {engine: {eps: 1e-6}}\n"
    )
    assert config.load(GRPOSettings, path).train.engine == {"eps": 1e-6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lr: 0.1}\nsteps: 3\ntrain: {minibatches: 1}", "line 3, column 1"),
        ('{"steps": 1, "train": {"lr": 0.1, "lr": 0.2}}', "line 1, column 35"),
        ("base: &b {lr: 1}\ntrain: {<<: *b, lr: 2, lr: 3}", "line 2, column 24"),
        ("1: a\n1: b", "line 2, column 1"),
    ],
)
def test_load_key_given_twice(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"the key '.*' is given twice .*{message}"):
        config.load(GRPOSettings, tmp_path / "run.yaml")


def test_load_toml_date(file: Path) -> None:
    file.write_text(
        file.read_text().replace(
            'train = "t.jsonl"', 'train = "t.jsonl"\ntemplate_args = {today = 2026-01-31}'
        )
    )
    found = config.load(GRPOSettings, file)
    assert found.data.template_args == {"today": "2026-01-31"}
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_load_file_extends_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        config.load(GRPOSettings, tmp_path / "a.yaml")


def test_as_yaml_loads_again(tmp_path: Path) -> None:
    found = settings(
        ("data.system_prompt", 'say "yes", or: no'), ("train.engine.weight_decay", "1e-6")
    )
    again = tmp_path / "again.yaml"
    again.write_text(config.as_yaml(found))
    assert config.load(GRPOSettings, again) == found


def test_make_jobs_large_instances() -> None:
    found = settings(
        ("cluster.rollout_devices", "16"),
        ("cluster.rollout_instances", "1"),
        name="many_nodes_gpu.yaml",
    )
    rollout = make_jobs(found)[1]
    assert (rollout.tasks[0].ray_placement_strategy, rollout.tasks[0].gpu) == ("deferred", 16)
    assert engine_arguments(found)["tensor_parallel_size"] == 16
    for name, value, message in (
        ("sync.way", "memory", "sync.way 'memory' reaches only one of these nodes"),
        ("sync.way", "auto", "sync.way 'auto' reaches only one of these nodes"),
        ("rollout.engine", "server", "expected rollout.engine 'vllm', not 'server'"),
    ):
        with pytest.raises(ValueError, match=f"an instance spans nodes; {message}"):
            settings(("cluster.rollout_devices", "16"), (name, value), name="many_nodes_gpu.yaml")


def test_make_jobs_reference() -> None:
    assert [job.role for job in make_jobs(settings())] == ["train", "rollout"]
    assert [job.role for job in make_jobs(settings(("algorithm.kl_coef", "0.01")))] == [
        "train",
        "rollout",
        "reference",
    ]


def test_settings_documented() -> None:
    assert all(meaning for _, _, meaning in config.all_keys(GRPOSettings))
    assert config.key_table(GRPOSettings) in DOCS.read_text(), (
        "docs/recipes.md has other keys; replace its table by key_table(GRPOSettings)"
    )
    assert all(f"`{name}`" in config.key_table(GRPOSettings) for name in ENGINES)


def test_config_beyond_limits(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: " + "[" * 100_000)
    with pytest.raises(ValueError, match=r"run\.yaml: values are nested too deeply"):
        config.load(GRPOSettings, path)
