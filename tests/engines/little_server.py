"""A small inference server as a program, which speaks the dialect of vLLM or SGLang over real
sockets.

Its model is a sum: the next token follows from all tokens before it and from the weights, which are
the first value of the first tensor by name in the folder that it loaded. So its tokens show which
weights it has. An adapter adds its first value to them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

VOCAB = 50
STEP_S = 0.002


def next_token(token_ids: list[int], weight: float) -> int:
    """Return the token that follows these tokens."""
    return int(sum(token_ids) * 7 + len(token_ids) * 3 + weight * 13) % VOCAB


def logprob_of(token: int, weight: float) -> float:
    """Return the log-probability of a generated token."""
    return -0.01 * token - weight


def weight_in(folder: str) -> float:
    """Return the first value of the first tensor by name, in float32.

    Raises:
        ValueError: The value is not a number.

    """
    found: dict[str, float] = {}
    for path in Path(folder).glob("*.safetensors"):
        data = path.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                found[name] = struct.unpack_from("<f", data, 8 + size + entry["data_offsets"][0])[0]
    weight = found[min(found)]
    if math.isnan(weight):
        raise ValueError("a tensor is torn")
    return weight


class Server:
    """The state and the routes of the server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.weight = weight_in(options.model)
        self.num_starting = options.busy
        self.num_refusing = 0
        self.num_unfinished = 3
        """Requests to flush the cache until the last batch is post-processed."""
        self.is_paused = False
        self.is_held = options.held
        self.running: dict[str, asyncio.Event] = {}
        """The event that ends each generation."""
        self.adapters: dict[str, float] = {}
        self.users: dict[str, str] = {}
        """The adapter of each generation that has one."""
        self.fails_to_pause = False
        self.seen: list[dict[str, Any]] = []
        self.peers: set[Any] = set()
        """Addresses of the clients that sent requests."""

    async def handle(self, request: Any) -> Any:
        route = request.path
        if route == "/forget":
            self.seen, self.peers = [], set()
            return web.Response()
        if route not in ("/health", "/v1/models", "/seen", "/refuse"):
            self.peers.add(request.transport.get_extra_info("peername"))
        body = await request.json() if request.can_read_body else None
        if route == "/refuse":
            self.num_refusing = body["count"]  # type: ignore[index]
            return web.Response()
        if route == "/fail-to-pause":
            self.fails_to_pause = True
            return web.Response()
        if route == "/seen":
            return web.json_response({"requests": self.seen, "connections": len(self.peers)})
        if route == "/health" and self.num_starting:
            self.num_starting -= 1
            return web.Response(status=503)
        if (
            route not in ("/health", "/metrics")
            and request.headers.get("Authorization") != f"Bearer {self.options.key}"
        ):
            return web.Response(status=401, text="wrong key")
        if route not in ("/health", "/metrics"):
            self.seen.append({"route": route, "body": body, "params": dict(request.query)})
        if route == "/health":
            return web.Response()
        if self.num_refusing and route in ("/v1/completions", "/generate"):
            self.num_refusing -= 1
            return web.Response(status=503, text="busy")
        handler = self.routes().get(route)
        try:
            return (
                web.Response(status=404, text="no such route")
                if handler is None
                else await handler(request, body)
            )
        except ConnectionResetError:  # its client has cancelled the request
            return web.Response()

    def routes(self) -> dict[str, Any]:
        common = {"/v1/models": self.models, "/metrics": self.metrics}
        if self.options.dialect == "vllm":
            takes = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in os.environ
            return common | {
                **({"/v1/load_lora_adapter": self.load_adapter} if takes else {}),
                **({"/v1/unload_lora_adapter": self.unload_adapter} if takes else {}),
                "/v1/completions": self.completions,
                "/pause": self.pause,
                "/resume": self.resume,
                "/collective_rpc": self.collective_rpc,
                "/reset_prefix_cache": self.succeed,
                "/sleep": self.succeed,
                "/wake_up": self.succeed,
            }
        return common | {
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.succeed,
        }

    async def models(self, request: Any, body: Any) -> Any:
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": "little", "max_model_len": self.options.max_model_len}],
            }
        )

    async def metrics(self, request: Any, body: Any) -> Any:
        names = {
            "vllm": (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            ),
            "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
        }[self.options.dialect]
        values = (len(self.running), 0, 0.25)
        lines = [
            f'{name}{{model_name="little"}} {value}'
            for name, value in zip(names, values, strict=True)
        ]
        return web.Response(
            text="# HELP something\n" + "\n".join(lines) + f'\n{names[0]}_by_lora{{a="b"}} 7\n'
        )

    # --- control ----------------------------------------------------------------------------------

    async def pause(self, request: Any, body: Any) -> Any:
        self.is_paused = True
        for event in self.running.values():
            event.set()
        if self.fails_to_pause:
            self.fails_to_pause = False
            while self.running:  # noqa: ASYNC110 - nothing reports their ends
                await asyncio.sleep(STEP_S)
            return web.Response(status=500, text="it paused, and then failed")
        return await self.succeed(request, body)

    async def resume(self, request: Any, body: Any) -> Any:
        self.is_paused = False
        return await self.succeed(request, body)

    async def succeed(self, request: Any, body: Any) -> Any:
        return web.json_response({"success": True})

    async def flush_cache(self, request: Any, body: Any) -> Any:
        self.num_unfinished = max(0, self.num_unfinished - 1)
        return web.Response(status=400 if self.num_unfinished else 200)

    async def release(self, request: Any, body: Any) -> Any:
        if self.num_unfinished:
            os._exit(1)  # as SGLang's scheduler, which asserts that no request runs
        return await self.succeed(request, body)

    async def collective_rpc(self, request: Any, body: Any) -> Any:
        assert body["method"] == "helmsman_load_files"
        problem = self.load(*body["args"])
        return web.json_response(
            {"results": [{"error": ["ValueError", problem], "torn": True} if problem else {}]}
        )

    async def update_weights_from_disk(self, request: Any, body: Any) -> Any:
        problem = self.load(body["model_path"])
        return web.json_response(
            {"success": not problem, "message": problem}, status=400 if problem else 200
        )

    def load(self, folder: str) -> str:
        """Load the weights; return the reason of a failure, '' if there is none."""
        assert self.is_paused or self.options.sleepy
        self.is_held = False
        try:
            self.weight = weight_in(folder)
        except ValueError as error:
            return str(error)
        return ""

    async def load_adapter(self, request: Any, body: Any) -> Any:
        name, folder = body["lora_name"], body["lora_path"]
        assert name not in self.adapters, "an adapter has the name of another one"
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        try:
            assert self.options.enable_lora
            assert config["r"] <= self.options.max_lora_rank
            assert config["lora_alpha"] == config["r"], "the scale is in B"
            self.adapters[name] = weight_in(folder)
        except ValueError as error:
            status = 500 if self.options.dialect == "vllm" else 400
            return web.json_response({"success": False, "error_message": str(error)}, status=status)
        if self.options.dialect == "vllm":
            return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")
        return await self.succeed(request, body)

    async def unload_adapter(self, request: Any, body: Any) -> Any:
        if body["lora_name"] in self.users.values():
            os._exit(1)  # vLLM would miss its files, and SGLang would wait for its end
        del self.adapters[body["lora_name"]]
        return await self.succeed(request, body)

    async def abort_request(self, request: Any, body: Any) -> Any:
        for name, event in self.running.items():  # as SGLang, all that begin with it
            if name.startswith(body["rid"]):
                event.set()
        return await self.succeed(request, body)

    # --- generation -------------------------------------------------------------------------------

    async def events(
        self,
        request_id: str,
        token_ids: list[int],
        most: int,
        stops: list[int],
        adapter: str | None,
    ) -> Any:
        """Yield the number of tokens so far, a new token or None, its log-probability, and a stop
        reason or None.
        """
        assert request_id not in self.running, "a request id is used twice"
        end = self.running[request_id] = asyncio.Event()
        if adapter is not None:
            self.users[request_id] = adapter
        made = list(token_ids)
        try:
            while True:
                await asyncio.sleep(STEP_S)
                if self.is_held and not end.is_set():
                    continue
                if end.is_set() or self.is_paused:
                    yield len(made) - len(token_ids), None, 0.0, "abort"
                    return
                weight = self.weight + (0.0 if adapter is None else self.adapters[adapter])
                token = next_token(made, weight)
                made.append(token)
                num_made = len(made) - len(token_ids)
                reason = "stop" if token in stops else "length" if num_made == most else None
                yield num_made, token, logprob_of(token, weight), reason
                if reason is not None:
                    return
        finally:
            del self.running[request_id]
            self.users.pop(request_id, None)

    async def answer(self, request: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment that keeps the connection alive\n\n")
        return response

    async def completions(self, request: Any, body: Any) -> Any:
        adapter = None if body["model"] == "little" else body["model"]
        if adapter is not None and adapter not in self.adapters:
            return web.Response(status=404, text=f"The model `{adapter}` does not exist.")
        response = await self.answer(request)
        if body["prompt"] == [49, 49]:
            await response.write(
                b'data: {"error": {"message": "this prompt is refused", "code": 400}}\n\n'
            )
            return response
        for sample in range(body["n"]):
            name = f"{id(request)}.{sample}"
            async for num_made, token, logprob, reason in self.events(
                name, body["prompt"], body["max_tokens"], body["stop_token_ids"], adapter
            ):
                tokens = [] if token is None else [token]
                if num_made == 0:
                    break  # as vLLM, which has no event for the end of a request without tokens
                choice = {
                    "index": sample,
                    "text": "",
                    "token_ids": tokens,
                    "logprobs": {"token_logprobs": [logprob]} if tokens else None,
                    "finish_reason": reason,
                }
                if body["prompt"] == [49, 48] and token is not None:
                    choice["logprobs"] = None
                if body["prompt"] == [49, 47]:
                    choice["index"] = -1
                event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                if body["prompt"] == [49, 46]:
                    event = event[:20] + b"\n\n"
                await response.write(event)
                if body["prompt"] == [49, 45]:
                    request.transport.abort()
                if body["prompt"] == [49, 44]:
                    return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request: Any, body: Any) -> Any:
        if body["lora_path"] is not None and body["lora_path"] not in self.adapters:
            return web.Response(status=400, text="Got LoRA adapter that has never been loaded")
        response = await self.answer(request)
        params, entries = body["sampling_params"], []
        stops = params.get("stop_token_ids", [])
        async for num_made, token, logprob, reason in self.events(
            body["rid"], body["input_ids"], params["max_new_tokens"], stops, body["lora_path"]
        ):
            new = [] if token is None else [[logprob, token, None]]
            entries += new
            meta: dict[str, Any] = {
                "id": body["rid"],
                "completion_tokens": num_made,
                "output_token_logprobs": new
                if self.options.incremental_streaming_output
                else entries,
                "finish_reason": None if reason is None else {"type": reason},
            }
            if body["input_ids"] == [49, 49]:
                meta["finish_reason"] = {
                    "type": "abort",
                    "message": "this prompt is refused",
                    "status_code": 400,
                }
            await response.write(
                b"data: " + json.dumps({"output_ids": [], "meta_info": meta}).encode() + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve(options: argparse.Namespace) -> None:
    """Serve until a signal ends the server."""
    server = Server(options)

    app = web.Application()
    app.router.add_route("*", "/{route:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, reuse_address=True).start()
    print(f"listening on {options.host}:{options.port}", flush=True)
    await asyncio.sleep(math.inf)


async def babble(options: argparse.Namespace) -> None:
    """Answer requests with lines that are not HTTP."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01 what?\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, options.host, options.port)
    print("it babbles", flush=True)
    await server.serve_forever()


def main() -> None:
    """Run the program that an engine starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dialect", choices=["vllm", "sglang"])
    parser.add_argument("mode", choices=["serve", "exit", "hang", "babble"])
    parser.add_argument("--model", "--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key", dest="key", default=os.environ.get("VLLM_API_KEY", ""))
    parser.add_argument("--max-model-len", "--context-length", type=int, default=100_000)
    parser.add_argument(
        "--held", action="store_true", help="generate nothing until weights have been loaded"
    )
    parser.add_argument("--busy", type=int, default=0, help="answers of 503 before it is ready")
    parser.add_argument("--family", default="", help="a file for the ids of children that hide")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument(
        "--enable-sleep-mode", "--enable-memory-saver", dest="sleepy", action="store_true"
    )
    options, _ = parser.parse_known_args()
    print(f"the little server was told {sys.argv[1:3]}", flush=True)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.family:
        hide = (
            "import os, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); "
            "time.sleep(1000)"
        )
        made = [
            subprocess.Popen(
                [sys.executable, "-c", code], env={}, start_new_session=True, stdout=subprocess.PIPE
            )
            for code in ("import os, time; print(os.getpid(), flush=True); time.sleep(1000)", hide)
        ]
        Path(options.family).write_text(
            " ".join(child.stdout.readline().decode().strip() for child in made if child.stdout)
        )
    if options.mode == "exit":
        sys.exit("there is no room for the model")
    if options.mode == "hang":
        signal.pause()
    asyncio.run(serve(options) if options.mode == "serve" else babble(options))


if __name__ == "__main__":
    main()
