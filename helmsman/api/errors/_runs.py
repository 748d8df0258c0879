"""Errors of training, rollouts, rewards and fault injection."""

from __future__ import annotations

from collections.abc import Sequence

from helmsman.api.errors._base import HelmsmanError, indented, output_section, stack_section
from helmsman.api.errors._calls import WorkerFailedError


class GenerationError(HelmsmanError):
    """A generation request that failed."""


class InstanceLostError(GenerationError, ConnectionError):
    """The rollout instance that held the request has exited or is unreachable."""

    instance_id: str
    reason: str
    """Description of the loss of the instance, without the request."""
    may_have_begun: bool
    """Whether the instance may have started the request."""
    template = (
        "rollout instance {instance_id} was lost and {begun} the request: {reason}. Give the "
        "generation scheduler a "
        "RetryGeneration policy to have such requests continued on other instances."
    )

    @property
    def begun(self) -> str:
        """Whether the instance had begun, as text of the message."""
        return "may have begun" if self.may_have_begun else "had not begun"


class RequestDeadlineError(GenerationError, TimeoutError):
    """A request that exceeded its own deadline and was aborted."""

    request_id: str
    state: str
    instance: str
    limit_s: float

    def describe(self) -> str:
        where = f" on {self.instance}" if self.instance else ""
        return (
            f"request {self.request_id!r} did not end within {self.limit_s:g} s "
            "(RequestOptions.deadline_s); it was "
            f"{self.state}{where}. Raise the deadline, lower max_new_tokens, or add instances if "
            "requests wait long."
        )


class RequestsInFlightError(GenerationError, TimeoutError):
    """Requests that did not end, or were not returned, before a wait timed out. They continue."""

    role: str
    operation: str
    in_flight: dict[str, int]
    """Instance id -> number of its requests."""
    num_queued: int
    paused: bool
    limit_s: float

    def describe(self) -> str:
        have = (
            ", ".join(f"{instance} has {num}" for instance, num in self.in_flight.items())
            or "none is in flight"
        )
        paused = "It is paused, and " if self.paused else ""
        advice = (
            "Call wait_idle again, end them with abort, or continue with resume"
            if self.paused
            else "Wait again, or end them with abort"
        )
        return (
            f"role {self.role!r}: {self.operation} has waited {round(self.limit_s, 3):g} s for "
            f"requests in flight: {have}. "
            f"{paused}{self.num_queued} are queued. {advice}. Requests in flight continue."
        )


class EngineDeadError(HelmsmanError, ConnectionError):
    """The processes that an engine started have ended.

    A rollout controller handles it as the death of the instance.
    """

    engine: str
    reason: str
    template = (
        "{engine} cannot serve any more: {reason}. Read the end of the worker's log; a rollout "
        "controller with a "
        "SupervisionPolicy replaces such an instance."
    )


class _ServerError(HelmsmanError):
    address: str
    reason: str
    exit_code: int | None
    """Negative for a signal; None if the server was still running."""
    log_tail: str

    @property
    def output(self) -> str:
        return output_section(self.log_tail)


class ServerLostError(_ServerError, EngineDeadError):
    """An inference server that has exited, or whose connection broke.

    Its running generations are lost.
    """

    engine: str = "ServerEngine"
    template = (
        "the inference server at {address} was lost: {reason}. Its running requests were not sent "
        "again. Give the rollout "
        "controller supervision, which replaces the instance, and retries=RetryGeneration(), "
        "which continues its requests "
        "on other instances.{output}"
    )


class ServerStartError(_ServerError):
    """An inference server that did not become ready."""

    command: str
    """The server's command line, without the key."""
    elapsed_s: float
    limit_s: float
    step: str
    template = (
        "the inference server at {address} did not become ready (limit {limit_s:g} s): {reason} "
        "after {elapsed_s:.1f} s. {step}."
        "\ncommand: {command}{output}"
    )


class ServerRequestError(HelmsmanError):
    """A request that an inference server refused, or answered with an unreadable response."""

    address: str
    route: str
    status: int
    """HTTP status code."""
    answer: str
    """The beginning of the server's answer."""
    expected: str
    step: str

    def describe(self) -> str:
        return (
            f"the inference server at {self.address} answered {self.route} with status "
            f"{self.status}; expected "
            f"{self.expected}. {self.step}.\n"
            f"response:\n{indented(self.answer.strip() or '(nothing)')}"
        )


class EpisodeTimeoutError(HelmsmanError, TimeoutError):
    """An episode of a workflow that exceeded its time limit and was cancelled."""

    item: str
    limit_s: float
    template = (
        "the episode of {item} did not end within {limit_s:g} s "
        "(WorkflowExecutor.episode_timeout), and was cancelled. Raise "
        "the limit, lower max_new_tokens, or limit the operation that the episode waits for."
    )


class WorkflowFailuresError(HelmsmanError):
    """More episodes of a workflow failed than are tolerated."""

    num_failed: int
    limit: int
    window: int
    last: str
    """Type and message of the last error."""
    template = (
        "{num_failed} of the last {window} episodes failed, and {limit} are tolerated "
        "(WorkflowExecutor.max_failures). "
        "The last error was {last}. Fix the workflow, let it return nothing for unusable episodes, "
        "or raise the limit."
    )


class RewardTimeoutError(HelmsmanError, TimeoutError):
    """A score that exceeded the time limit of its RewardPool."""

    worker_id: str
    call: str
    elapsed_s: float
    limit_s: float
    then: str
    stack: str = ""
    """Position of the worker's engine thread; empty for an async function."""
    template = (
        "{worker_id}: {call} did not end within {elapsed_s:.2f} s (limit {limit_s:g} s, "
        "RewardPool's timeout). {then}. Raise "
        "the limit if the function is only slow.{at}"
    )

    @property
    def at(self) -> str:
        """Stack of the scoring thread, as text of the message; empty if unknown."""
        return stack_section("was", self.stack)


class RewardLostError(HelmsmanError):
    """A score whose worker exited, possibly after starting it.

    It has no result and is not repeated.
    """

    worker_id: str
    call: str
    reason: str
    template = (
        "{call} has no result and was not repeated, because its worker exited: {reason}. Other "
        "workers continue; the lost one is "
        "restarted as often as RewardPool.max_restarts allows. Score the item again if repeating "
        "the call is safe."
    )


class RewardWorkersSpentError(HelmsmanError):
    """A RewardPool that has no worker left and no restarts left in its budget."""

    role: str
    num_workers: int
    max_restarts: int
    window_s: float
    reason: str
    template = (
        "none of the {num_workers} workers of role {role!r} is left, after {max_restarts} restarts "
        "within {window_s:g} s, the most that RewardPool.max_restarts allows. Last failure: "
        "{reason}. Fix the reward function, or allow more restarts."
    )


class CheckpointError(HelmsmanError):
    """A checkpoint that the ranks of a training job cannot load."""

    role: str
    path: str
    reason: str

    def describe(self) -> str:
        reason = self.reason.rstrip(".")
        return (
            f"role {self.role!r} cannot load the checkpoint {self.path}: {reason}. Remove it "
            "to continue from the previous one."
        )


class DevicesNotOwnedError(HelmsmanError):
    """A call that needs devices which another role currently owns."""

    role: str
    method: str
    owner: str
    next_step: str
    template = "role {role!r}: {method} needs the devices, which are {owner}. {next_step}"


class DeviceMemoryError(HelmsmanError):
    """A call that ran out of memory on devices that two roles use in turns."""

    worker_id: str
    method: str
    reason: str
    owner: str
    figures: Sequence[str]

    def describe(self) -> str:
        lines = "".join(f"\n  {line}" for line in self.figures)
        return (
            f"{self.worker_id}: {self.method} ran out of memory: {self.reason}\n  the devices are "
            f"{self.owner}; memory by worker:"
            f"{lines}\nReduce the memory of the largest role: fewer tokens per micro-batch, "
            "gradient checkpointing or offload "
            "for the trainer; a smaller cache, or sleep(level=2), for the rollout."
        )


class RecoveryExhaustedError(HelmsmanError):
    """A train worker was lost after the job had used all recoveries of its RecoveryPolicy."""

    loss: WorkerFailedError
    num_recoveries: int
    window_s: float
    checkpoint: str
    """Directory of the last checkpoint; '' if there is none."""
    reason: str = ""

    @property
    def role(self) -> str:
        """Role of the ranks."""
        return self.loss.role

    @property
    def rank(self) -> int:
        """Rank that was lost."""
        return self.loss.index

    @property
    def log_path(self) -> str:
        """Log of the rank that was lost."""
        return self.loss.log_path

    def describe(self) -> str:
        loss = self.loss
        failed = f" The last of them failed: {self.reason}." if self.reason else ""
        where = (
            f"continue from {self.checkpoint}"
            if self.checkpoint
            else "start over, because there is no checkpoint"
        )
        return (
            f"role {self.role!r}: rank {self.rank} ({loss.worker_id} on node {loss.node}, pid "
            f"{loss.pid}) {loss.cause}, after "
            f"{self.num_recoveries} recoveries within {self.window_s:g} s, which is the most that "
            "RecoveryPolicy."
            f"max_recoveries allows.{failed} Fix the cause, or allow more recoveries, and start "
            f"the script again to {where}."
            f"{loss.log}"
        )


class ParallelLayoutError(HelmsmanError, ValueError):
    """A model or world size that the training configuration cannot divide."""

    what: str
    requested: int
    observed: str
    step: str
    template = "{what} is {requested}; {observed}. {step}."


class FaultsUnsupportedError(HelmsmanError):
    """A scheduler whose workers cannot be killed or stopped individually."""

    scheduler: str
    template = (
        "{scheduler} runs its workers in the script's process, which a fault would kill or stop, "
        "too. Run the drill on "
        "the 'local' or 'ray' scheduler, or remove the fault plan."
    )
