"""The clients of `http_server.py --demo`: they ask, they read along, and some leave.  Only the standard library."""

from __future__ import annotations

import asyncio
import json
import time
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from hicache_actors.integrations.serving import ServingEngine

PATIENCE_S = 60.0
LONG = 2000  # tokens: nobody waits for that many


class Clients:
    """Each call blocks a thread, as that of a client elsewhere would; ``engine`` is looked at to see what became of them."""

    def __init__(self, port: int, engine: ServingEngine, system: str) -> None:
        self._port, self._engine, self._system = port, engine, system
        self._problems: list[str] = []

    async def run(self) -> int:
        """-> exit status."""
        first = await asyncio.to_thread(self._read_along, "What is this about?", 8)
        again = await asyncio.to_thread(self._read_along, "Say it again.", 8)
        print(f"prompt tokens: {first['prompt_tokens']}, then {again['prompt_tokens']}")
        reused = again["prompt_tokens_details"]["cached_tokens"]
        print(f"of which cached: {first['prompt_tokens_details']['cached_tokens']}, then {reused}")
        self._expect(reused > 100, "the second client had nothing from the cache")

        await asyncio.to_thread(self._leave_in_the_middle)
        await self._all_ended("who read along", aborted=1)
        await self._leave_before_the_answer()
        await self._all_ended("who waited for the whole answer", aborted=2)

        for path in ("health", "snapshot", "metrics"):
            status, text = await asyncio.to_thread(self._call, "GET", f"/hicache/{path}")
            self._expect(status == 200, f"{path}: {status}")
            if path == "health":
                print(f"health: {text}")
        print("; ".join(self._problems) or "OK: prefixes were reused, and who left cost nothing more")
        return 1 if self._problems else 0

    def _read_along(self, question: str, max_tokens: int) -> dict[str, Any]:
        response = self._ask(question, max_tokens, stream=True)
        chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        print(f"{question} -> {text!r}")
        usage: dict[str, Any] = chunks[-1]["usage"]
        return usage

    def _leave_in_the_middle(self) -> None:
        response = self._ask("Tell me everything.", LONG, stream=True)
        for _ in range(6):
            response.readline()
        response.close()

    async def _leave_before_the_answer(self) -> None:
        connection = self._connect()
        await asyncio.to_thread(self._send, connection, "Think for a while.", LONG, False)
        await self._until(lambda: self._engine.snapshot().running == 1, "nobody serves the request")
        connection.close()

    def _ask(self, question: str, max_tokens: int, *, stream: bool) -> HTTPResponse:
        connection = self._connect()
        self._send(connection, question, max_tokens, stream)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read().decode()}")
        return response

    def _send(self, connection: HTTPConnection, question: str, max_tokens: int, stream: bool) -> None:
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        body = json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": stream})
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request("POST", "/v1/chat/completions", body, headers)

    def _call(self, method: str, path: str) -> tuple[int, str]:
        connection = self._connect()
        connection.request(method, path, headers={"connection": "close"})
        response = connection.getresponse()
        return response.status, response.read().decode()

    def _connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)

    async def _all_ended(self, who: str, *, aborted: int) -> None:
        await self._until(
            lambda: (self._engine.snapshot().running, self._engine.snapshot().aborted) == (0, aborted),
            f"the request of the client {who} goes on",
        )
        print(f"the client {who} has left: {self._engine.snapshot().generated_tokens} tokens so far, none is running")

    async def _until(self, there: Any, problem: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not there() and time.monotonic() < deadline_s:  # noqa: ASYNC110 (an engine says nothing when it looks idle)
            await asyncio.sleep(0.02)
        self._expect(there(), problem)

    def _expect(self, well: bool, problem: str) -> None:
        if not well:
            self._problems.append(problem)
