"""A toy engine through all three tiers, and a restart: ``python examples/quickstart.py``.

The "model" writes K and V that follow from the token and its position, so a reused page can be checked without computing it
again.  The device pool holds two of the four conversations: the others come back from the host, and after the restart all come
back from storage.  Takes about a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import torch

from hicache_actors import (
    Account,
    Config,
    HiCache,
    HostConfig,
    KVShape,
    KVTensors,
    Lease,
    ModelFacts,
    Prompt,
    Shortfall,
    StorageConfig,
)

PAGE_SIZE = 16
SHAPE = KVShape(layers=4, kv=2, heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)


class ToyEngine:
    """Keeps KV tensors of its own, as a real engine does, and lets the cache decide which pages hold what."""

    def __init__(self, device_pages: int) -> None:
        self.kv = KVTensors.make(SHAPE, device_pages)
        self.wrong_tokens = 0

    def forward(self, prompt: Prompt, lease: Lease) -> None:
        """The prefill, in a worker thread: checks what was reused, computes the rest, layer by layer."""
        tokens = torch.frombuffer(bytearray(prompt.packed), dtype=torch.int64)
        positions = torch.arange(len(prompt))
        pages = torch.tensor(lease.pages)[positions // PAGE_SIZE]
        rows, reused = positions % PAGE_SIZE, lease.usable_tokens
        for layer in range(SHAPE.layers):
            if lease.loading is not None:
                lease.loading.wait(layer, timeout_s=5.0)  # only for this layer's copy
            for kind, tensor in enumerate(self.kv.layer(layer)):
                wanted = ((tokens * 31 + positions * 7 + layer * 3 + kind) % 1009).to(tensor.dtype)
                wanted = wanted[:, None, None].expand(-1, SHAPE.heads, SHAPE.head_dim)
                found = tensor[pages[:reused], rows[:reused]]
                self.wrong_tokens += int((found != wanted[:reused]).any(dim=(1, 2)).sum())
                tensor[pages[reused:], rows[reused:]] = wanted[reused:]


async def answer(cache: HiCache, engine: ToyEngine, prompt: Prompt) -> Account:
    """One request, from admission to the end of its prefill."""
    async with cache.acquire(prompt, deadline_s=5.0) as lease:
        if not isinstance(lease.allocate(len(prompt) - lease.usable_tokens), Shortfall):
            return await compute(engine, prompt, lease)
    # Pages are still being copied for earlier requests: give back what was found, and wait in line.
    async with cache.room(len(prompt), deadline_s=5.0) as room:
        if isinstance(room, Shortfall):
            raise SystemExit(f"the device pool is too small: {room}")
        async with cache.acquire(prompt, deadline_s=5.0, room=room) as lease:
            shortfall = lease.allocate(len(prompt) - lease.usable_tokens)
            if isinstance(shortfall, Shortfall):
                raise SystemExit(f"what was reserved is not there: {shortfall}")
            return await compute(engine, prompt, lease)


async def compute(engine: ToyEngine, prompt: Prompt, lease: Lease) -> Account:
    await lease.run(engine.forward, prompt, lease)
    if lease.loading is not None and (await lease.loading.verdict()).failed is not None:
        raise SystemExit("a load failed; a server would release the lease and try again")
    lease.commit(len(prompt))
    return lease.account


async def serve(config: Config, device_pages: int, prompts: dict[str, Prompt], title: str) -> tuple[int, Account]:
    """Open a cache, answer every prompt twice, write what is still to be written -> wrong tokens, and the sum of accounts."""
    engine = ToyEngine(device_pages)
    accounts = []
    async with HiCache.open(config, engine.kv) as cache:
        for turn in (1, 2):
            for name, prompt in prompts.items():
                account = await answer(cache, engine, prompt)
                accounts.append(account)
                print(
                    f"{title:8} {name}, turn {turn}: {len(prompt):5} tokens = {account.device:5} device + {account.host:5} host"
                    f" + {account.storage:5} storage + {account.computed:5} computed"
                )
        pages_left = await cache.drain(deadline_s=10.0)
        print(f"{title:8} closing; pages not yet stored: {pages_left}")
    total = Account(
        device=sum(account.device for account in accounts),
        host=sum(account.host for account in accounts),
        storage=sum(account.storage for account in accounts),
        computed=sum(account.computed for account in accounts),
        reasons={},
    )
    return engine.wrong_tokens, total


async def main(prompt_tokens: int) -> int:
    shared, own = prompt_tokens // 2, prompt_tokens - prompt_tokens // 2
    prompts = {
        f"user {user}": Prompt([*range(1000, 1000 + shared), *range(10_000 * user, 10_000 * user + own)])
        for user in range(1, 5)
    }
    pages_each = prompt_tokens // PAGE_SIZE + 1
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=4 * pages_each),
        model=ModelFacts(model_id="toy", weights="v1"),
        storage=StorageConfig(url="memory://quickstart", prefetch_threshold_tokens=PAGE_SIZE),
    )
    first_wrong, first = await serve(config, 2 * pages_each, prompts, "first")
    second_wrong, second = await serve(config, 2 * pages_each, prompts, "restart")
    wrong = first_wrong + second_wrong
    print(f"reused tokens with wrong bytes: {wrong}")
    every_tier_served = bool(first.host and (first.device or second.device) and second.storage)
    return 0 if wrong == 0 and every_tier_served else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A toy engine through all three tiers of the cache, and a restart.")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="length of each prompt (default: 1024)")
    options = parser.parse_args()
    if options.prompt_tokens < 8 * PAGE_SIZE:
        parser.error(f"--prompt-tokens: at least {8 * PAGE_SIZE}, for pages to share and pages of one's own")
    sys.exit(asyncio.run(main(options.prompt_tokens)))
