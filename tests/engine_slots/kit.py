"""What the tests of engine-owned blocks share."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread

from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.block_engine import BlockAnswer, BlockEngine
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small
from hicache_actors.testing.toy_model import LayerLoad, ToyModel


class HeldModel(ToyModel):
    """Passes over ``held`` prompts (by their first token) do not begin before `go` is set."""

    def __init__(self, kv: KVTensors) -> None:
        super().__init__(kv)
        self.held: set[int] = set()
        self.go = threading.Event()

    def forward(self, prompt: Prompt, pages: Sequence[int], start: int, end: int, load: LayerLoad | None = None) -> int:
        if prompt.tolist()[0] in self.held:
            assert self.go.wait(20.0), "nobody let it go"
        return super().forward(prompt, pages, start, end, load)


@asynccontextmanager
async def engine(*, whole: bool = True, **settings: Any) -> AsyncIterator[tuple[Small, BlockEngine, HeldModel]]:
    """A cache behind an engine that owns its blocks.  When the block ends well, all pools must be whole, the engine's as well."""
    broken = {name: settings.pop(name) for name in ("reuse", "after_loads", "on_step") if name in settings}
    async with open_small(driver="step", slots="engine", **settings) as small:
        model = HeldModel(small.cache.kv)
        toy = BlockEngine(small.cache, model, **broken)
        try:
            yield small, toy, model
        finally:
            model.go.set()
            await anyio.to_thread.run_sync(toy.close)
        if whole:
            assert toy.pool.free == toy.pool.total
            check_conservation(small.cache.core)
            await anyio.to_thread.run_sync(_forget, small)
            check_whole(small.cache.core)


def _forget(small: Small) -> None:
    cache = small.cache
    cache.begin_step()
    cache.core.check()
    assert not cache.core.state.pins.all, "a lookup was not finished"
    cache.driver.decide(lambda core: core.reset())
    cache.end_step()
    while cache.needs_step:
        cache.begin_step()
        cache.end_step()


async def run(toy: BlockEngine, prompts: Sequence[tuple[str, Prompt]], new_tokens: int = 1) -> dict[str, BlockAnswer]:
    return await anyio.to_thread.run_sync(lambda: toy.run(prompts, new_tokens=new_tokens))


def reference(small: Small, asked: Prompt, new_tokens: int = 1) -> tuple[int, ...]:
    """What a model without any cache says."""
    whole = Prompt(asked.tolist(), asked.scope)
    kv = KVTensors.make(small.cache.kv.shape, (len(asked) + new_tokens) // small.cache.page_size + 1)
    tokens: list[int] = []
    for _ in range(new_tokens):
        tokens.append(ToyModel(kv).forward(whole, range(kv.pages), 0, len(whole)))
        whole.append([tokens[-1]])
    return tuple(tokens)
