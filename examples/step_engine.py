"""An engine with a thread of its own and two steps in flight: ``python examples/step_engine.py``.

The engine's thread decides in steps, between `begin_step` and `end_step`.  The forward pass of a step runs on the "GPU" (a thread
here) while the next step is decided, so pages are committed and leases are released with an event that fires when the pass has
ended.  Copies and storage run on the event loop, beside both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import anyio.to_thread

from hicache_actors import (
    Config,
    HiCache,
    HostConfig,
    KVShape,
    KVTensors,
    Lease,
    Load,
    ModelFacts,
    Prefetch,
    Prompt,
    Shortfall,
    StorageConfig,
)
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import Completion

PAGE_SIZE = 16
BATCH = 2  # new requests in a step


class Request:
    def __init__(self, rid: str, prompt: Prompt) -> None:
        self.rid, self.prompt = rid, prompt
        self.fetch: Prefetch | None = None
        self.lease: Lease | None = None
        self.load: Load | None = None
        self.forward: Future[int] | None = None
        self.computed = Completion()

    @property
    def settled(self) -> bool:
        """Its forward pass has ended, and whether what it loaded was good is agreed: now its token may be shown."""
        return bool(self.forward and self.forward.done()) and (self.load is None or self.load.result() is not None)


class Engine:
    def __init__(self, cache: HiCache, model: ToyModel) -> None:
        self.cache, self.model = cache, model
        self.gpu = ThreadPoolExecutor(1)
        self.steps = 0
        self.tokens: dict[str, int] = {}

    def run(self, prompts: dict[str, Prompt]) -> dict[str, int]:
        """In the engine's thread -> prompt tokens by where they came from."""
        cache = self.cache
        waiting = [Request(rid, prompt) for rid, prompt in prompts.items()]
        running: list[Request] = []
        launched: list[Request] = []
        sources = dict.fromkeys(("device", "host", "storage", "computed"), 0)
        while waiting or running or cache.needs_step:
            cache.begin_step()  # applies what has ended since the last step
            self.steps += 1
            for request in launched:  # the pass of the last step may still run: hence the event
                assert request.lease is not None
                request.lease.commit(len(request.prompt), after=request.computed)
            for request in [request for request in running if request.settled]:
                running.remove(request)
                assert request.lease is not None
                assert request.forward is not None
                result = request.load.result() if request.load is not None else None
                if result is None or result.failed is None:
                    self.tokens[request.rid] = request.forward.result()
                    for source in sources:
                        sources[source] += getattr(request.lease.account, source)
                else:  # no token may come from a failed load: once more
                    waiting.append(Request(request.rid, request.prompt))
                request.lease.release(after=request.computed)
            launched = [request for request in waiting if self.fetched(request)][:BATCH]
            launched = [request for request in launched if self.admit(request)]
            waiting = [request for request in waiting if request not in launched]
            running += launched
            cache.end_step()  # the copies that this step has decided start here
            for request in launched:
                request.forward = self.gpu.submit(self.forward, request)
            if running and not launched:
                wait([request.forward for request in running if request.forward], 0.005, FIRST_COMPLETED)
        self.gpu.shutdown()
        return sources

    def fetched(self, request: Request) -> bool:
        """Whether what storage has of it is on the host; asked for at the first sight."""
        if request.fetch is None:
            request.fetch = self.cache.prefetch(request.prompt, request.rid, deadline_s=1.0)
        return request.fetch.settled

    def admit(self, request: Request) -> bool:
        """Lease, load, allocate; if there is no room everything is given back, for nobody waits while holding pages."""
        lease = self.cache.lease(request.prompt, request.rid)
        load = lease.load()
        if isinstance(lease.allocate(len(request.prompt) - lease.usable_tokens), Shortfall):
            lease.release()
            return False
        request.lease, request.load = lease, None if isinstance(load, Shortfall) else load
        return True

    def forward(self, request: Request) -> int:
        """On the GPU: waits, in each layer, for that layer's copy only; raises if reused KV is not that of the prompt."""
        assert request.lease is not None
        try:
            prompt, start = request.prompt, request.lease.usable_tokens
            return self.model.forward(prompt, request.lease.pages, start, len(prompt), request.load)
        finally:
            request.computed.finish()


async def main(requests: int) -> int:
    kv = KVTensors.make(KVShape(layers=4, kv=2, heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE), pages=48)
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=64),
        model=ModelFacts(model_id="toy", weights="v1"),
        storage=StorageConfig(url="memory://steps", prefetch_threshold_tokens=4 * PAGE_SIZE),
    )
    draw = random.Random(1)
    topics = [Prompt([*range(120), *range(1000 * topic, 1000 * topic + 150)]) for topic in range(1, 7)]
    prompts = {f"r{number}": draw.choice(topics) for number in range(requests)}
    async with HiCache.open(config, kv, driver="step") as cache:
        engine = Engine(cache, ToyModel(kv))
        sources = await anyio.to_thread.run_sync(engine.run, prompts)
    print(f"{len(engine.tokens)} requests in {engine.steps} steps")
    print("prompt tokens: " + " + ".join(f"{count} {source}" for source, count in sources.items()))
    print("reused tokens with wrong bytes: 0")  # the model would have raised
    return 0 if len(engine.tokens) == requests and sources["device"] + sources["host"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An engine thread with two steps in flight.")
    parser.add_argument("--requests", type=int, default=40, help="how many prompts to serve (default: 40)")
    options = parser.parse_args()
    if options.requests < 10:
        parser.error("--requests: at least 10, so that some share a topic")
    sys.exit(asyncio.run(main(options.requests)))
