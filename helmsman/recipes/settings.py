"""Settings of the recipes as typed structs.

The docstring of a field is its text in the documentation's tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from helmsman import SamplingParams
from helmsman.api.corrections import Correction

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Factor: TypeAlias = Annotated[float, msgspec.Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopP: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Machines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines and placement of the run; moving to more machines changes only this section."""

    scheduler: Literal["ray", "local", "inline"] = "local"
    """``ray``: on this machine or a cluster; ``local``: processes on this machine, without Ray;
    ``inline``: inside the script's process, for a debugger."""
    address: str | None = None
    """Ray cluster to join. When null, the run joins the cluster given by `helmsman up` or
    RAY_ADDRESS, or starts one on this machine.
    """
    num_nodes: Positive = 1
    """Number of nodes that the run waits for."""
    devices_per_node: Natural = 0
    """Accelerators (GPUs or NPUs) per node; 0 runs on CPUs."""
    device_memory_gb: Amount = 0.0
    """Memory of an accelerator in GB, used to derive sizes; 0 means unknown."""
    placement: Literal["separated", "colocated"] = "separated"
    """``separated``: trainers and rollout instances have their own devices; ``colocated``: they
    take turns on the trainers' devices."""
    train_workers: Positive = 1
    """Ranks of the trainer, with one device each."""
    rollout_instances: Positive = 1
    """Number of rollout instances."""
    rollout_devices: Positive = 1
    """Devices per rollout instance. With vLLM this is the tensor-parallel size; an instance with
    more devices than a node has spans nodes.
    """
    train_cpus: Amount = 4.0
    """CPU cores per train worker."""
    rollout_cpus: Amount = 4.0
    """CPU cores per rollout instance."""
    train_threads: Natural = 0
    """Threads per train worker; 0 takes ``train_cpus``."""
    rollout_threads: Natural = 0
    """Threads per rollout instance; 0 takes ``rollout_cpus``."""
    train_mem: Amount = 0.0
    """Memory requested per train worker in GB; 0 requests no amount."""
    rollout_mem: Amount = 0.0
    """Memory requested per rollout instance in GB; 0 requests no amount."""
    env_vars: dict[str, str] = {}
    """Environment variables for all workers."""
    start_timeout_s: Seconds = 600.0
    """Time limit for starting all workers, in seconds."""
    engine_timeout_s: Seconds = 1800.0
    """Time limit for an engine to build its model, in seconds."""
    call_timeout_s: Seconds = 3600.0
    """Time limit of one worker call, such as a training step or a checkpoint, in seconds."""

    @property
    def takes_turns(self) -> bool:
        """Whether trainers and rollout instances take turns on the same devices."""
        return self.placement == "colocated" and bool(self.devices_per_node)

    @property
    def rollout_spans_nodes(self) -> bool:
        """Whether a rollout instance has more devices than a node."""
        return 0 < self.devices_per_node < self.rollout_devices


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer, a helmsman.engines.train.FSDPTrainEngine."""

    lr: Amount = 1e-6
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over ``steps``."""
    lr_end: Amount = 0.0
    """Learning rate at the last step of a decaying schedule, as a fraction of ``lr``."""
    minibatches: Positive = 1
    """Optimizer steps per batch; each uses an equal part of the batch."""
    engine: dict[str, Any] = {}
    """Other fields of helmsman.engines.train_config.TrainConfig, such as
    max_tokens_per_micro_batch, num_warmup_steps, gradient_checkpointing, tensor_parallel_size,
    context_parallel_size or lora."""

    @property
    def lora(self) -> dict[str, Any] | None:
        """The adapters that are trained instead of the model, ``engine.lora``."""
        found: dict[str, Any] | None = self.engine.get("lora")
        return found

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that share one data-parallel part of the batch."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(
            self.engine.get("context_parallel_size", 1)
        )


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instances that generate answers."""

    engine: str = "hf"
    """``vllm``, ``hf`` (Helmsman's own, on transformers), ``server`` (vLLM or SGLang as a server),
    ``recorded`` (the rollouts of another run, without instances), or a class's import path."""
    engine_args: dict[str, Any] = {}
    """Other arguments of the engine."""
    max_new_tokens: Positive = 1024
    """Maximum length of an answer in tokens."""
    temperature: Amount = 1.0
    """Sampling temperature in training."""
    top_p: TopP = 1.0
    """Nucleus sampling threshold in training."""
    top_k: Natural = 0
    """Number of top tokens to sample from in training; 0 means all."""
    max_in_flight: Positive = 64
    """Maximum number of requests in flight per instance."""
    staleness: Amount = 0.0
    """Maximum age of answers, in training steps, relative to the weights that they train.
    Fractions are allowed; 0 is synchronous.
    """
    oversample: Factor = 1.0
    """Over-sampling factor: prompts started per prompt needed, so that slow or filtered ones are
    replaced at once.
    """
    episode_timeout: Seconds = 1800.0
    """Time limit for all answers to one prompt and their rewards, in seconds."""
    policy: Literal["least_tokens", "prefix", "round_robin"] = "least_tokens"
    """Routing of requests to instances."""
    record: bool = False
    """Write all rollouts that are trained on into ``rollouts`` in ``out``, a parquet file for each
    step."""
    recorded: str | None = None
    """Output folder of the run whose rollouts the engine ``recorded`` repeats. That run had the
    same tokenizer, prompts and rewards."""

    @property
    def is_recorded(self) -> bool:
        """Whether the rollouts of another run are repeated."""
        return self.engine == "recorded"


AGENT_REWARD = "agent"
"""Name of the reward that an agent returns."""


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent that uses the model through an API, in place of single answers and rewards."""

    use: str = ""
    """Import path of its function, ``pkg.mod:fn`` or ``path/file.py:fn``. It has some of the
    parameters ``task`` (the row), ``base_url``, ``api_key``, ``model`` and ``session``, and returns
    its reward."""
    command: str = ""
    """A program instead of a function. It finds the row in HELMSMAN_TASK, the API by the variables
    of the vendors' SDKs, and posts its reward to HELMSMAN_SESSION_URL/reward."""
    timeout_s: float = 600.0
    """Time limit of a session in seconds."""
    max_turns: int | None = None
    """Maximum turns of the model in a session."""
    max_tokens: int | None = None
    """Maximum tokens that the model samples in a session."""
    max_context: int | None = None
    """Maximum tokens of a turn's prompt and answer together; data.max_prompt_tokens plus
    rollout.max_new_tokens when not given."""
    truncated_reward: float | None = None
    """Reward of a session that reached a limit; by default its own."""
    credit: Literal["session", "turn"] = "session"
    """``session`` compares the rewards of a group's sessions; ``turn`` compares, turn by turn, the
    sums of the later rewards."""
    discount: float = 1.0
    """Factor per turn of later rewards, for ``turn``."""
    family: str | None = None
    """Form of the model's tool calls; recognised from the chat template when not given."""
    host: str = "127.0.0.1"
    """Address on which the gateway listens; 0.0.0.0 for all, so that agents in containers or on
    other nodes reach it."""
    port: int = 0
    """Port on which the gateway listens; 0 for a free one."""
    public_url: str | None = None
    """URL by which agents reach the gateway, such as that of a proxy; by default ``host`` and
    ``port``."""

    @property
    def is_given(self) -> bool:
        """Whether there is an agent."""
        return bool(self.use or self.command)


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows for training and evaluation; docs/data.md has all forms of files and rows."""

    train: str | tuple[str, ...]
    """File, pattern of files or dataset folder to train on, or a list of them. Python scripts can
    also pass tables, and iterables of mappings, texts, chats or token ids."""
    held_out: str | tuple[str, ...] | None = None
    """The same to evaluate on."""
    split: str | None = None
    """Split of a dataset folder to train on; ``train``, or the only one, when null."""
    held_out_split: str | None = None
    """Split of ``held_out``, or of ``train`` if that is null, to evaluate on; ``test``, or the only
    one, when null."""
    subset: str | None = None
    """Subset (configuration) of a dataset folder that has several."""
    num_held_out: Natural = 0
    """Number of training rows held out for evaluation instead; drawn by ``seed`` and never trained
    on."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, a message, a list of messages, or a list of token ids."""
    answer_key: str = "answer"
    """Key of the correct answer, any JSON value; optional unless a reward needs it."""
    source_key: str = "data_source"
    """Key of the source's name, by which evaluation results are grouped. Rows without it take the
    file's name.
    """
    system_prompt: str | None = None
    """System prompt added to prompts that have no system message."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's template. Without any template, a text is passed to
    the model unchanged.
    """
    template_args: dict[str, Any] = {}
    """Other variables of the template, such as enable_thinking."""
    max_prompt_tokens: Positive = 1024
    """Maximum length of a prompt in tokens, template included."""
    max_tokens: Positive = 2048
    """Maximum length of prompt plus answer in SFT and DPO, in tokens."""
    on_long_prompt: Literal["drop", "error"] = "drop"
    """``drop`` leaves out and counts rows that are too long; ``error`` rejects them before the run
    starts.
    """
    on_bad_row: Literal["raise", "skip"] = "raise"
    """``raise`` rejects a row that cannot be used before the run starts; ``skip`` leaves it out and
    counts it."""
    shuffle: bool = True
    """Draw a new order for each epoch from ``seed``; otherwise keep the file's order."""


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward; the reward of an answer is the weighted sum of all."""

    use: str = ""
    """``math`` (math-verify), ``exact``, ``number``, ``format``, or your own function as
    ``module:function`` or ``path/to/file.py:function``; empty with a ``judge``."""
    judge: str | None = None
    """Local folder of a model that judges the answers, in place of ``use``: a reward model
    (sequence classification), whose score is the reward, or a language model that is asked by
    ``prompt``."""
    prompt: str = ""
    """Jinja template of the text for the judge, or a file ``*.jinja``, with the row's keys and the
    names that rewards receive, such as ``completion`` and ``answer``. A reward model needs none: it
    reads the chat with the answer in its own chat template, or prompt and answer as a pair."""
    parse: str = ""
    """The number in the text that a language model answers: a regular expression, of whose last
    match the first group counts, or a function of this text, written as in ``use``."""
    label: str | int | None = None
    """Label of a judge with several, by name or number, whose probability is the reward."""
    max_new_tokens: Positive = 512
    """Maximum length of the greedy answer of a language model as judge, in tokens."""
    instances: Positive = 1
    """Number of instances of the judge."""
    devices: Natural = 1
    """Devices of each instance, which it shares with nothing else; 0 runs it on CPUs. Without
    accelerators this has no effect."""
    engine: str | None = None
    """Engine of a language model as judge, one of those of ``rollout.engine``; its value when null,
    or ``hf`` on CPUs. ``rollout.engine_args`` are not its own."""
    engine_args: dict[str, Any] = {}
    """Other arguments of the judge's engine."""
    name: str | None = None
    """Name in metrics; defaults to the last part of ``use`` or ``judge``."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    args: dict[str, Any] = {}
    """Arguments: ``pattern`` for ``format``, ``tolerance`` for ``number``, keyword arguments for
    your own function, variables of a judge's chat template.
    """
    timeout_s: Seconds = 30.0
    """Time limit in seconds for one answer, or for all answers to a prompt if the function takes
    batches. A judge has it for a text from the moment at which it is sent to an instance, which
    holds up to ``rollout.max_in_flight``.
    """
    on_failure: Literal["drop", "raise", "value"] = "drop"
    """Treatment of an answer for which the reward raises, times out or returns no number.
    ``drop`` leaves it out, up to a tenth of a batch; ``raise`` ends the run; ``value`` takes
    ``failure_value``.
    """
    failure_value: float = 0.0
    """The reward of such an answer with ``on_failure: value``."""
    processes: Positive = 4
    """Number of processes that compute the reward, or ``parse`` of a judge."""
    on_cluster: bool = False
    """Compute the reward on workers of the run's cluster instead of the script's machine."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objective; fields that are null take the value of the preset."""

    preset: Literal["grpo", "dr_grpo", "dapo", "ppo"] = "grpo"
    """``grpo`` (arXiv:2402.03300), ``dr_grpo`` (arXiv:2503.20783), ``dapo`` (arXiv:2503.14476), or
    ``ppo`` with a critic (arXiv:1707.06347)."""
    normalize_std: bool | None = None
    """Divide advantages by the standard deviation of their group."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """Combination of token losses. ``token``: mean over all tokens; ``sequence``: mean of the
    answers' means; ``constant``: each answer's sum divided by ``rollout.max_new_tokens``.
    """
    clip_low: Amount | None = None
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: Amount | None = None
    """The probability ratio is clipped above at 1 + clip_high."""
    overlong_filter: bool | None = None
    """Exclude answers truncated at ``rollout.max_new_tokens`` from training."""
    dynamic_sampling: bool | None = None
    """Replace prompts whose answers all have the same reward."""
    max_filtered_batches: Positive = 10
    """Number of whole batches of prompts that dynamic sampling may discard in a row before the run
    ends with an error.
    """
    overlong_buffer: Natural = 0
    """Number of last tokens of ``rollout.max_new_tokens`` over which ``overlong_penalty`` grows
    (DAPO, eq. 13); 0 disables the penalty.
    """
    overlong_penalty: Amount = 1.0
    """Penalty subtracted from the reward of an answer of full length."""
    kl_coef: Amount = 0.0
    """Weight of the KL divergence to the initial model. When not 0, a frozen copy of that model
    runs beside the trainer.
    """
    teacher: str = ""
    """Local folder of a teacher with the same tokenizer (on-policy distillation): log teacher - log
    policy of each sampled token is added to its advantage. With a teacher, ``rewards`` may be
    empty, but for the preset ``ppo``."""
    teacher_coef: Amount = 1.0
    """Weight of the teacher beside the rewards."""
    teacher_workers: Natural = 0
    """Ranks of a teacher on devices of its own, with one device each; 0 runs it beside the trainer,
    on its devices."""
    teacher_top_k: Natural = 0
    """Number of the teacher's most probable tokens. The reverse KL divergence over them, with all
    other tokens as one more, is then a part of the loss; 0 for advantages of the sampled tokens
    instead."""
    old_logprobs: Literal["rollout", "trainer", "both"] = "rollout"
    """Log-probabilities in the denominator of the ratio. ``rollout``: those at sampling;
    ``trainer``: the trainer's before the step. ``both`` uses the rollout's and adds the trainer's
    as ``prox_logprobs``, for a loss that reads both, such as decoupled PPO."""
    loss: str = "grpo"
    """Name or import path of the loss, called with clip_low, clip_high, and kl_coef where it is not
    0.
    """
    loss_args: dict[str, Any] = {}
    """Other arguments of the loss."""


class Critic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of PPO, used by the preset ``ppo``."""

    lr: Amount = 1e-5
    """Learning rate."""
    gamma: Amount = 1.0
    """Discount factor per token."""
    lam: Amount = 0.95
    """Lambda of generalised advantage estimation (arXiv:1506.02438)."""
    clip: Amount | None = 0.2
    """Clip range of a value around its old value; null for no clipping."""


class Sync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfer of weights to the rollout instances."""

    way: Literal["auto", "memory", "device", "collective", "disk"] = "auto"
    """``memory``: shared memory or Ray's object store; ``device``: buffers on devices that trainer
    and instances share; ``auto``: ``device`` where they share devices, else ``memory``;
    ``collective``: broadcasts by gloo, nccl or hccl; ``disk``: files."""
    folder: str | None = None
    """Folder for ``disk``, reachable by all nodes; a folder in ``out`` when null."""
    dtype: DType | None = None
    """Type in which weights are sent, such as bfloat16; null keeps their type."""
    bucket_mb: Positive = 256
    """Size of the buckets in which parameters are sent, in MB."""
    checksum: bool = False
    """Verify a checksum of every parameter on arrival."""
    lora: Literal["auto", "adapter", "merged"] = "auto"
    """Weights that a trainer of adapters (train.engine.lora) sends. ``adapter``: adapters alone;
    with ``vllm`` and ``server``, requests in flight end under the adapter that they began with.
    ``merged``: the whole model with the adapters merged into it, for any engine; ``auto``:
    ``adapter`` where the engine takes it."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight during an update. ``keep``: they continue with the new weights; ``wait``:
    they finish with the old weights first; ``abort``: they are aborted and resume with the new
    weights on any instance (partial rollout)."""


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A check of the instances' weights after every update; --check-weights enables it."""

    weights: bool = False
    """After every update, compare log-probabilities of a few greedy answers between each instance
    and the trainer; the run fails when they differ."""
    prompts: Positive = 4
    """Number of prompts."""
    max_new_tokens: Positive = 16
    """Maximum length of each answer in tokens."""
    tolerance: Amount = 1e-3
    """Largest allowed difference of a log-probability. 1e-3 suits float32; lower precision needs
    more."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation on held-out prompts."""

    every: Natural = 10
    """Steps between evaluations; 0 for none."""
    at_start: bool = True
    """Evaluate before the first step, too."""
    samples: Natural = 1
    """Sampled answers per prompt for pass@k; 0 for none."""
    k: tuple[int, ...] = (1,)
    """Values of k for pass@k (arXiv:2107.03374, eq. 1), at most ``samples``."""
    temperature: Amount = 0.6
    """Sampling temperature of those answers."""
    top_p: TopP = 0.95
    """Nucleus sampling threshold of those answers."""
    greedy: bool = True
    """Generate one greedy answer per prompt, too."""
    max_new_tokens: Positive | None = None
    """Maximum length of an answer in tokens; ``rollout.max_new_tokens`` when null."""
    reward: str | None = None
    """Name of the reward that decides whether an answer is correct; the first one when null."""
    right_from: float = 1.0
    """Smallest value of that reward for a correct answer."""


class Tracking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trackers for metrics; ``metrics.jsonl`` in ``out`` is always written."""

    to: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)
    """Any of ``console``, ``tensorboard`` and ``wandb``."""
    samples: Natural = 4
    """Samples written to ``samples.jsonl`` per step; 0 for none."""
    show_samples_every: Natural = 10
    """Steps between sample tables on the console; 0 for none."""
    project: str = "helmsman"
    """Project in Weights & Biases."""
    name: str | None = None
    """Name of the run; the name of the folder ``out`` when null."""
    logprob_diff: bool = True
    """Report the difference between the rollout's and the trainer's log-probabilities of the
    generated tokens of up to 16 answers per step; of all, if ``algorithm.old_logprobs`` is not
    ``rollout``, since the forward pass over them is needed then."""


class Saving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints, recovery and the exported model."""

    every: Positive = 20
    """Steps between checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints that are kept."""
    max_recoveries: Natural = 3
    """Maximum rebuilds of lost train workers within an hour, and of the reference's workers within
    the run.
    """
    in_background: bool = False
    """Write checkpoints while the next steps run."""
    export: Literal["none", "last", "all"] = "last"
    """Write the model in the Hugging Face layout. ``last``: the final model, into ``model`` in
    ``out``; ``all``: the model of each checkpoint, into ``model`` in its folder."""
    export_dtype: DType | None = None
    """Type of the exported weights, such as bfloat16; null keeps their type."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings shared by all recipes."""

    model: str
    """Local Hugging Face folder of the initial model, at the same path on every node."""
    data: Data
    cluster: Machines = Machines()
    train: Train = Train()
    tracking: Tracking = Tracking()
    checkpoints: Saving = Saving()
    steps: Positive = 100
    """Number of training steps."""
    seed: Natural = 0
    """Random seed for data order, initialisation and sampling."""
    out: str = "runs/train"
    """Output folder, at the same path on every node."""

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus answer in tokens."""
        return self.data.max_tokens

    def trained_len(self, longest_row: int) -> int:
        """Return the maximum length of a sequence that is trained on in tokens."""
        return longest_row


class SFTSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of supervised fine-tuning."""

    train: Train = Train(lr=1e-5)
    batch_size: Positive = 64
    """Rows per step."""
    evaluate_every: Natural = 10
    """Steps between evaluations on held-out rows; 0 for none."""
    teacher: str = ""
    """Local folder of a teacher with the same tokenizer, whose probabilities of the rows' answers
    are trained on, too: (1 - teacher_coef) * loss + teacher_coef * KL(teacher || policy)
    (arXiv:1503.02531)."""
    teacher_coef: Share = 0.5
    """Share of the teacher in the loss."""
    teacher_workers: Natural = 0
    """Ranks of a teacher on devices of its own, with one device each; 0 runs it beside the trainer,
    on its devices."""
    teacher_top_k: Positive = 64
    """Number of the teacher's most probable tokens that are compared; all other tokens are one
    more."""
    out: str = "runs/sft"
    """Output folder, at the same path on every node."""


class DPOSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of DPO."""

    batch_size: Positive = 64
    """Pairs per step."""
    beta: Amount = 0.1
    """Beta of the DPO loss (arXiv:2305.18290): larger values keep the policy closer to the
    reference."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Form of the loss (arXiv:2305.18290, arXiv:2310.12036)."""
    evaluate_every: Natural = 10
    """Steps between evaluations on held-out pairs; 0 for none."""
    out: str = "runs/dpo"
    """Output folder, at the same path on every node."""


class GRPOSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of GRPO, Dr. GRPO, DAPO or PPO."""

    rewards: tuple[Reward, ...] = ()
    agent: Agent = Agent()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    correction: Correction = Correction()
    sync: Sync = Sync()
    check: Check = Check()
    evaluation: Evaluation = Evaluation()
    prompts_per_step: Positive = 64
    """Prompts per step."""
    samples_per_prompt: Positive = 8
    """Answers per prompt; their rewards are compared within this group."""
    out: str = "runs/grpo"
    """Output folder, at the same path on every node."""

    @property
    def judges(self) -> list[Reward]:
        """The rewards that a model computes; recorded answers have their rewards."""
        return [each for each in self.rewards if each.judge and not self.rollout.is_recorded]

    @property
    def is_rewarded(self) -> bool:
        """Whether rewards count in training, and not a teacher alone."""
        algorithm = self.algorithm
        others = self.agent.is_given or (algorithm.overlong_buffer and algorithm.overlong_penalty)
        return bool(others) or any(each.weight for each in self.rewards)

    @property
    def num_instances(self) -> int:
        """Number of rollout instances and of instances of judges."""
        judges = [each for each in self.rewards if each.judge]  # the same for recorded answers
        return self.cluster.rollout_instances + sum(each.instances for each in judges)

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus answer in tokens."""
        longest = max(
            self.rollout.max_new_tokens,
            self.evaluation.max_new_tokens or 0 if self.evaluation.every else 0,
            self.check.max_new_tokens if self.check.weights else 0,
        )
        return max(self.data.max_prompt_tokens + longest, self.agent.max_context or 0)

    def trained_len(self, longest_row: int) -> int:
        """Return the maximum length of a sequence that is trained on in tokens."""
        return max(longest_row + self.rollout.max_new_tokens, self.agent.max_context or 0)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of training, without stop tokens and seed."""
        rollout = self.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )


def distillation(settings: RunSettings) -> tuple[Algorithm | SFTSettings, str]:
    """Return the settings of a teacher, defaults without one, and the prefix of their keys."""
    if isinstance(settings, GRPOSettings):
        return settings.algorithm, "algorithm."
    return settings if isinstance(settings, SFTSettings) else Algorithm(), ""


def devices_apart(settings: RunSettings) -> dict[str, int]:
    """Return the numbers of devices that judges and a teacher have alone, by their settings."""
    found, prefix = distillation(settings)
    apart = {f"{prefix}teacher_workers": found.teacher_workers}
    if isinstance(settings, GRPOSettings):
        for each in settings.judges:
            at = f"rewards[{settings.rewards.index(each)}]"
            apart[f"{at}.instances x devices"] = each.instances * each.devices
    return {key: num for key, num in apart.items() if num and settings.cluster.devices_per_node}


def name_of(reward: Reward) -> str:
    """Return the name of a reward in metrics."""
    found = Path(reward.judge).absolute().name if reward.judge else reward.use.rpartition(":")[2]
    return reward.name or found
