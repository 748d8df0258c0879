"""The settings of recipes as typed structs. A field's docstring is what the documentation says of
its key.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from helmsman import SamplingParams

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run is. One machine and many differ in this section alone."""

    scheduler: Literal["ray", "local", "inline"] = "local"
    """``ray``, on this machine or a cluster; ``local``: processes of this machine, without Ray;
    ``inline``: in the script's own process, for a debugger."""
    address: str | None = None
    """Ray cluster to join; without it the one that `helmsman up` or RAY_ADDRESS names, else a new
    one on this machine.
    """
    num_nodes: int = 1
    """Nodes to wait for."""
    devices_per_node: int = 0
    """Accelerators of a node, GPUs or NPUs; 0 for a run on CPUs."""
    device_memory_gb: float = 0.0
    """Memory of an accelerator in GB, from which sizes are derived; 0: not known."""
    placement: Literal["separated", "colocated"] = "separated"
    """``separated``: trainers and instances have devices of their own; ``colocated``: they take
    turns on the trainers'."""
    train_workers: int = 1
    """Ranks of the trainer; each has one device."""
    rollout_instances: int = 1
    """Instances that generate."""
    rollout_devices: int = 1
    """Devices of each instance. With vLLM they hold its tensor-parallel ranks; more than a node has
    are spread over nodes.
    """
    train_cpus: float = 4.0
    """CPU cores of each trainer."""
    rollout_cpus: float = 4.0
    """CPU cores of each instance."""
    train_threads: int = 0
    """Threads of each trainer; 0: as many as ``train_cpus``."""
    rollout_threads: int = 0
    """Threads of each instance; 0: as many as ``rollout_cpus``."""
    train_mem: float = 0.0
    """Memory of each trainer in GB; 0 asks for none in particular."""
    rollout_mem: float = 0.0
    """Memory of each instance in GB; 0 asks for none in particular."""
    env_vars: dict[str, str] = {}
    """Environment variables of all workers."""
    start_timeout_s: float = 600.0
    """Seconds until all workers must stand."""
    engine_timeout_s: float = 1800.0
    """Seconds until an engine must have built its model."""
    call_timeout_s: float = 3600.0
    """Seconds that one call of a worker may take, a training step or a checkpoint, say."""

    @property
    def takes_turns(self) -> bool:
        """Whether trainers and instances have the same devices, and so use them one after the
        other.
        """
        return self.placement == "colocated" and bool(self.devices_per_node)


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer: helmsman.engines.train.FSDPTrainEngine."""

    lr: float = 1e-6
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls over ``steps``."""
    lr_end: float = 0.0
    """Share of the rate that is left at the last step of a schedule that falls."""
    minibatches: int = 1
    """Optimizer steps that are taken on each batch, each on its part."""
    engine: dict[str, Any] = {}
    """Further fields of helmsman.engines.train_config.TrainConfig, such as
    max_tokens_per_micro_batch, num_warmup_steps, gradient_checkpointing, tensor_parallel_size or
    context_parallel_size."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one part of the batch."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(
            self.engine.get("context_parallel_size", 1)
        )


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What generates answers."""

    engine: str = "hf"
    """``vllm``, ``hf`` (Helmsman's own, on transformers), ``server`` (vLLM or SGLang as a server),
    or a class's import path."""
    engine_args: dict[str, Any] = {}
    """Further arguments of the engine."""
    max_new_tokens: int = 1024
    """Longest answer in tokens."""
    temperature: float = 1.0
    """Of the sampling in training."""
    top_p: float = 1.0
    """Of the sampling in training."""
    top_k: int = 0
    """Of the sampling in training; 0 keeps all."""
    max_in_flight: int = 64
    """Requests that an instance has at once."""
    staleness: float = 0.0
    """Steps that answers may be older than the weights they train, also a fraction; 0 is
    synchronous.
    """
    oversample: float = 1.0
    """How many times a batch's prompts are begun for it, so that slow or filtered ones are replaced
    at once.
    """
    episode_timeout: float = 1800.0
    """Seconds for all answers to one prompt and their rewards."""
    policy: Literal["least_tokens", "prefix", "round_robin"] = "least_tokens"
    """Which instance a request goes to."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows to train and to evaluate on: JSONL files with an object per line, or Hugging Face
    dataset folders.
    """

    train: str
    """File or dataset folder to train on. In Python also rows: any iterable of mappings, texts,
    chats or token ids."""
    held_out: str | None = None
    """File or dataset folder to evaluate on."""
    num_held_out: int = 0
    """Lines of the training file to evaluate on instead, drawn by ``seed`` and never trained on."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, a list of {role, content}, or a list of token ids."""
    answer_key: str = "answer"
    """Key of the right answer, any JSON value; it may be absent where no reward needs it."""
    source_key: str = "data_source"
    """Key of the source's name, by which evaluations are grouped; the file's name where a line has
    none.
    """
    system_prompt: str | None = None
    """Put before prompts that have no system message."""
    chat_template: str | None = None
    """Jinja file in place of the tokenizer's own template. Without any, a text is given to the
    model as it is.
    """
    template_args: dict[str, Any] = {}
    """Further variables of the template, such as enable_thinking."""
    max_prompt_tokens: int = 1024
    """Longest prompt, template included."""
    max_tokens: int = 2048
    """Longest sequence of SFT and DPO, prompt and answer."""
    on_long_prompt: Literal["drop", "error"] = "drop"
    """What is done with longer ones: they are left out and counted, or end the run before it
    starts.
    """
    shuffle: bool = True
    """Another order in each epoch, drawn by ``seed``; the file's order otherwise."""


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward; an answer's is the sum of all, by their weights."""

    use: str
    """``math`` (math-verify), ``exact``, ``number``, ``format``, or a function of yours:
    ``module:function`` or ``path/to/file.py:function``."""
    name: str | None = None
    """Its name in metrics; what ``use`` says when absent."""
    weight: float = 1.0
    """Factor in the sum."""
    args: dict[str, Any] = {}
    """Arguments: ``pattern`` of ``format``; ``tolerance`` of ``number``; keyword arguments of a
    function of yours.
    """
    timeout_s: float = 30.0
    """Seconds for one answer; one that takes longer gets 0, and is counted."""
    processes: int = 4
    """Processes that compute it."""
    on_cluster: bool = False
    """Compute it on workers of the run's cluster instead of the script's machine."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is optimised. The fields that are null come from the preset."""

    preset: Literal["grpo", "dr_grpo", "dapo", "ppo"] = "grpo"
    """``grpo`` (arXiv:2402.03300), ``dr_grpo`` (arXiv:2503.20783), ``dapo`` (arXiv:2503.14476), or
    ``ppo`` with a critic (arXiv:1707.06347)."""
    normalize_std: bool | None = None
    """Divide advantages by the standard deviation of their group."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """Mean over all tokens, over each answer first, or each answer's sum over
    ``rollout.max_new_tokens``.
    """
    clip_low: float | None = None
    """The probability ratio counts down to 1 - clip_low."""
    clip_high: float | None = None
    """The probability ratio counts up to 1 + clip_high."""
    overlong_filter: bool | None = None
    """Answers that were cut at ``rollout.max_new_tokens`` are not trained on."""
    dynamic_sampling: bool | None = None
    """Prompts whose answers all have the same reward are replaced by others."""
    max_filtered_batches: int = 10
    """Batches' worth of prompts that dynamic sampling may throw away in a row before the run ends
    with an error.
    """
    overlong_buffer: int = 0
    """Last tokens of ``rollout.max_new_tokens`` over which ``overlong_penalty`` grows (DAPO, eq.
    13); 0 for none.
    """
    overlong_penalty: float = 1.0
    """Taken from the reward of an answer of full length."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the model of the start, which is kept frozen beside the
    trainer when this is not 0.
    """
    old_logprobs: Literal["rollout", "trainer", "both"] = "rollout"
    """Whose log-probabilities the ratio is to: those with which tokens were drawn, or the trainer's
    of before the step. With ``both`` the samples have the trainer's as ``prox_logprobs``, for a
    loss that reads both, such as decoupled PPO."""
    loss: str = "grpo"
    """Name or import path of the loss, which is given clip_low, clip_high, and kl_coef where it is
    not 0.
    """
    loss_args: dict[str, Any] = {}
    """Further arguments of the loss."""


class Critic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of PPO, which the preset ``ppo`` has."""

    lr: float = 1e-5
    """Learning rate."""
    gamma: float = 1.0
    """Discount of a token."""
    lam: float = 0.95
    """Weight of longer estimates of the advantage (arXiv:1506.02438)."""
    clip: float | None = 0.2
    """Largest step of a value away from its old one; null for no limit."""


class Sync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights reach the instances."""

    way: Literal["memory", "collective", "disk"] = "memory"
    """Shared memory or Ray's store; broadcasts of gloo, nccl or hccl; files."""
    folder: str | None = None
    """Of ``disk``: a folder that all nodes reach; one in ``out`` when absent."""
    dtype: DType | None = None
    """Type in which weights are sent, such as bfloat16; null leaves them as they are."""
    bucket_mb: int = 256
    """Parameters that are sent together."""
    checksum: bool = False
    """Check every parameter's bytes where they arrive."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of answers that are under way: they go on with the new weights, end first by the
    old ones, or are taken back and go on with the new ones on any instance (partial rollout)."""


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A check of the weights after every update; --check-weights turns it on."""

    weights: bool = False
    """After every update each instance answers a few prompts greedily, and the trainer computes the
    log-probabilities of the same tokens; the run ends when they differ."""
    prompts: int = 4
    """How many prompts."""
    max_new_tokens: int = 16
    """Tokens of each answer."""
    tolerance: float = 1e-3
    """Largest difference of a log-probability. 1e-3 is for float32; lower precision needs more."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers to held-out prompts."""

    every: int = 10
    """Steps between evaluations; 0 for none."""
    at_start: bool = True
    """Also before the first step."""
    samples: int = 1
    """Answers to each prompt for pass@k; 0 for none."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k (arXiv:2107.03374, eq. 1), none above ``samples``."""
    temperature: float = 0.6
    """Of those answers."""
    top_p: float = 0.95
    """Of those answers."""
    greedy: bool = True
    """Also one answer without chance."""
    max_new_tokens: int | None = None
    """Longest answer; ``rollout.max_new_tokens`` when null."""
    reward: str | None = None
    """Name of the reward that says whether an answer is right; the first one when null."""
    right_from: float = 1.0
    """Value of that reward from which an answer is right."""


class Tracking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where metrics go. ``metrics.jsonl`` in ``out`` is always written."""

    to: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)
    """``console``, ``tensorboard``, ``wandb``; several at once."""
    samples: int = 4
    """Rows of each step that are written to ``samples.jsonl``; 0 for none."""
    show_samples_every: int = 10
    """Steps between sample tables on the console; 0 for none."""
    project: str = "helmsman"
    """Project in Weights & Biases."""
    name: str | None = None
    """Name of the run; the name of ``out`` when null."""
    logprob_diff: bool = True
    """Have the trainer compute the log-probabilities of what was generated, and report how far the
    two are apart. It costs a forward pass, which ``algorithm.old_logprobs: trainer`` needs in any
    case."""


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run leaves behind."""

    every: int = 20
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that stay, the newest."""
    max_recoveries: int = 3
    """How often within an hour lost train workers are rebuilt; and how often in all those of the
    reference.
    """
    in_background: bool = False
    """Write checkpoints while the next steps are done."""
    export: Literal["none", "last", "all"] = "last"
    """Write the model in the Hugging Face layout: the last into ``model`` in ``out``, or each
    checkpoint's into ``model`` in its folder."""
    export_dtype: DType | None = None
    """Type of what is exported, such as bfloat16; null leaves it as it is."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all recipes share."""

    model: str
    """Local Hugging Face folder to start from; every node reaches it at this path."""
    data: Data
    cluster: Cluster = Cluster()
    train: Train = Train()
    tracking: Tracking = Tracking()
    checkpoints: Checkpoints = Checkpoints()
    steps: int = 100
    """Training steps."""
    seed: int = 0
    """Of everything that is drawn."""
    out: str = "runs/train"
    """Output folder; every node reaches it."""


class SFTSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of supervised fine-tuning."""

    train: Train = Train(lr=1e-5)
    batch_size: int = 64
    """Rows of a step."""
    evaluate_every: int = 10
    """Steps between evaluations on held-out rows; 0 for none."""
    out: str = "runs/sft"
    """Output folder; every node reaches it."""


class DPOSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of DPO."""

    batch_size: int = 64
    """Pairs of a step."""
    beta: float = 0.1
    """Weight of the distance to the reference (arXiv:2305.18290)."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Form of the loss (arXiv:2305.18290, arXiv:2310.12036)."""
    evaluate_every: int = 10
    """Steps between evaluations on held-out pairs; 0 for none."""
    out: str = "runs/dpo"
    """Output folder; every node reaches it."""


class GRPOSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of GRPO, Dr. GRPO or DAPO."""

    rewards: tuple[Reward, ...]
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    sync: Sync = Sync()
    check: Check = Check()
    evaluation: Evaluation = Evaluation()
    prompts_per_step: int = 64
    """Prompts of a step."""
    samples_per_prompt: int = 8
    """Answers to each, which are compared with each other."""
    out: str = "runs/grpo"
    """Output folder; every node reaches it."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        longest = max(
            self.rollout.max_new_tokens,
            self.evaluation.max_new_tokens or 0 if self.evaluation.every else 0,
            self.check.max_new_tokens if self.check.weights else 0,
        )
        return self.data.max_prompt_tokens + longest

    @property
    def sampling(self) -> SamplingParams:
        """Of training, without stop tokens and seed."""
        rollout = self.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )


def name_of(reward: Reward) -> str:
    """What a reward is called in metrics."""
    return reward.name or reward.use.rpartition(":")[2]
