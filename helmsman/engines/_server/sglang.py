"""SGLang's dialect.

Written from the documentation and the sources of SGLang 0.5.23, and **not run with it**: it needs CUDA's libraries to be
installed. The tests speak with a server of their own that answers as those say.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman.engines._server.protocol import Call, Chunk, ServerConfig, Stats, require_logprobs
from helmsman.engines._serving.requests import Attempt


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None
    """There for an error, which SGLang tells as an abort."""


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    finish_reason: _Finish | None = None


class _Event(msgspec.Struct, frozen=True):
    meta_info: _Meta = _Meta()
    error: Any = None


class SGLangDialect:
    """SGLang's native server (``/generate``).

    Seeds count only with the server's ``--enable-deterministic-inference`` (ServerConfig.args). Its key is among the arguments
    of its command line, where other users of the machine can read it.
    """

    health_route = "/health"
    samples_together = False  # a sample could not be aborted alone; the prompt is computed once anyway (RadixAttention)
    stats = Stats("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

    def command(self, config: ServerConfig, host: str, port: int, key: str) -> list[str]:
        return [
            *(config.command or (sys.executable, "-m", "sglang.launch_server")),
            *("--model-path", config.model, "--host", host, "--port", str(port), "--api-key", key, "--dtype", config.dtype),
            *("--tp-size", str(config.tensor_parallel_size), "--random-seed", str(config.seed)),
            *(("--context-length", str(config.max_model_len)) if config.max_model_len is not None else ()),
            *("--skip-tokenizer-init", "--enable-metrics", "--log-level-http", "warning"),
            *(("--enable-memory-saver", "--enable-weights-cpu-backup") if config.sleep else ()),
            *config.args,
        ]

    def environment(self, config: ServerConfig, key: str) -> dict[str, str]:
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}  # at temperature 1; else they are those of what is drawn from

    def generation(self, model: str, attempt: Attempt) -> Call:
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
        }
        return Call("/generate", body)

    def chunks(self, event: bytes, num_tokens: Sequence[int]) -> list[Chunk]:
        # An event has all tokens so far, or with the server's --incremental-streaming-output the new ones.
        decoded = msgspec.json.decode(event, type=_Event)
        if decoded.error is not None:
            raise ValueError(str(decoded.error))
        meta, before = decoded.meta_info, num_tokens[0]
        finish = meta.finish_reason
        if finish is not None and (finish.type not in ("stop", "length", "abort") or finish.status_code is not None):
            raise ValueError(f"it ended for the reason {finish.type!r} ({finish.status_code}): {finish.message}")
        entries = meta.output_token_logprobs
        if len(entries) == meta.completion_tokens:
            entries = entries[before:]
        elif before + len(entries) != meta.completion_tokens:
            raise ValueError(
                f"it has {len(entries)} log-probabilities after {before} tokens, and says that there are "
                f"{meta.completion_tokens} tokens"
            )
        token_ids = [entry[1] for entry in entries]
        logprobs = require_logprobs(token_ids, [entry[0] for entry in entries])
        return [Chunk(0, token_ids, logprobs, finish.type if finish is not None else None)]  # type: ignore[arg-type]

    def abort(self, request_id: str) -> Call | None:
        return Call("/abort_request", {"rid": request_id})

    def pause(self) -> list[Call]:
        return [Call("/pause_generation", {"mode": "abort"})]

    def resume(self) -> list[Call]:
        return [Call("/continue_generation", {})]

    def load(self, path: str) -> list[Call]:
        return [Call("/update_weights_from_disk", {"model_path": path, "flush_cache": True})]

    def sleep(self, level: int) -> list[Call]:
        return [Call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})]

    def wake(self, *, weights: bool, cache: bool) -> list[Call]:
        tags = [tag for tag, wanted in (("weights", weights), ("kv_cache", cache)) if wanted]
        return [Call("/resume_memory_occupation", {"tags": tags})] if tags else []
