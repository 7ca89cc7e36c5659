"""A toy engine that owns its blocks, as vLLM and others do: ``slots="engine"``, in a thread of its own, two steps in flight.

It has a free list, reference counts, a block table for each request and a prefix cache of its own; the cache behind it is asked
for what that lacks.  A block is free when nobody refers to it: a request, or a load or save whose id has not been named ended.

``reuse`` and ``after_loads`` exist to break the two rules that keep its bytes right, for the tests that must see that.
"""

from __future__ import annotations

import concurrent.futures
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import BlockLoad
from hicache_actors.core.news import StepNews
from hicache_actors.core.words import TOKEN_BYTES, Shortfall
from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.runtime import Workers
from hicache_actors.testing.block_script import Reuse
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import Completion

_FORWARD_WAIT_S = 0.005


class BlockAnswer(msgspec.Struct, frozen=True):
    """``local_tokens`` came from the engine's own blocks, ``loaded_tokens`` from the cache, both of the last try."""

    tokens: tuple[int, ...]
    local_tokens: int
    loaded_tokens: int
    retries: int


class BlockPool:
    """Blocks by reference count.  What is free keeps its contents, and its place in the prefix cache, until it is taken."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = dict.fromkeys(range(blocks))  # next to be taken first
        self._refs = [0] * blocks
        self._cached: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n_blocks: int) -> list[int] | None:
        if n_blocks > len(self._free):
            return None
        taken = [block for block, _ in zip(self._free, range(n_blocks), strict=False)]
        for block in taken:
            self._cached.pop(self._key_of.pop(block, b""), None)
        self.refer(taken)
        return taken

    def refer(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was given back twice"
            if not self._refs[block]:
                self._free[block] = None

    def cached(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the leading pages that are here."""
        found = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        for key, block in zip(keys, blocks, strict=False):
            if key not in self._cached and block not in self._key_of:
                self._cached[key], self._key_of[block] = block, key


class _Request:
    def __init__(self, rid: str, prompt: Prompt, new_tokens: int) -> None:
        self.rid, self.asked, self.new_tokens = rid, prompt, new_tokens
        self.prompt = Prompt(prompt.tolist(), prompt.scope)  # it grows
        self.tokens: list[int] = []  # generated
        self.blocks: list[int] = []
        self.computed_tokens = self.local_tokens = self.loaded_tokens = self.retries = 0
        self.started = False
        self.load: BlockLoad | None = None
        self.load_failed: str | None = None
        self.load_agreed = True
        self.forward: Future[int] | None = None
        self.computed = Completion()
        self.saved_tokens = 0

    def start_over(self) -> None:
        self.prompt = Prompt(self.asked.tolist(), self.asked.scope)
        self.tokens, self.blocks = [], []
        self.computed_tokens = self.local_tokens = self.loaded_tokens = self.saved_tokens = 0
        self.started = False
        self.load, self.load_failed, self.load_agreed = None, None, True
        self.forward = None


class BlockEngine:
    """``run`` on the engine's thread.  ``on_step(engine, step)`` is called in each open step: there a test may `abort`."""

    def __init__(
        self,
        cache: HiCache,
        model: ToyModel,
        *,
        batch: int = 3,
        reuse: Reuse = "ended",
        after_loads: bool = True,
        on_step: Callable[[BlockEngine, int], None] | None = None,
    ) -> None:
        self.cache, self.model = cache, model
        self.pool = BlockPool(model.kv.pages)
        self.answers: dict[str, BlockAnswer] = {}
        self.stats: Counter[str] = Counter()
        self.page_size = cache.page_size
        self._batch, self._reuse, self._after_loads, self._on_step = batch, reuse, after_loads, on_step
        self._stream = Workers("toy-gpu", 1)
        self._last: Completion | None = None  # the pass that was launched last
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._held: dict[str, list[int]] = {}  # id -> blocks that were given to it
        self._loading: dict[str, _Request] = {}

    def run(self, prompts: Sequence[tuple[str, Prompt]], *, new_tokens: int = 1) -> dict[str, BlockAnswer]:
        """Serve all prompts, then make empty steps until nothing is open -> rid to answer (aborted ones have none)."""
        cache = self.cache
        self._waiting.extend(_Request(rid, prompt, new_tokens) for rid, prompt in prompts)
        step = 0
        while self._waiting or self._running or self._held or cache.needs_step:
            step += 1
            self._take(cache.begin_step())
            for request in list(self._running):
                self._settle(request)
            if self._on_step is not None:
                self._on_step(self, step)
            launched = self._schedule()
            cache.end_step()
            for request in launched:
                self._launch(request)
            passes = [request.forward for request in self._running if request.forward is not None]
            if passes and not launched:
                concurrent.futures.wait(passes, _FORWARD_WAIT_S, concurrent.futures.FIRST_COMPLETED)
        return self.answers

    def close(self) -> None:
        """End the compute thread."""
        self._stream.close(1.0)

    def open_rids(self) -> list[str]:
        """Requests that wait or run: in an open step."""
        return [request.rid for request in (*self._waiting, *self._running)]

    def abort(self, rid: str) -> None:
        """In an open step, at whatever moment of the request."""
        for request in [request for request in self._waiting if request.rid == rid]:
            self._waiting.remove(request)
            self._give_up(request)
        for request in [request for request in self._running if request.rid == rid]:
            self._running.remove(request)
            self.stats["aborted_in_flight"] += request.forward is not None
            self.stats["aborted_while_loading"] += not request.load_agreed
            self._give_up(request)
        self.stats["aborted"] += 1

    # -- a step --------------------------------------------------------------------------------------------------------

    def _take(self, news: StepNews) -> None:
        for load in news.loads:
            request = self._loading.pop(load.id, None)
            if request is not None and request.load is not None and request.load.id == load.id:
                request.load_agreed, request.load_failed = True, load.result.failed
            self.stats["loads_failed"] += load.result.failed is not None
        for save in news.saves:
            self.stats["saved_pages"] += save.saved_pages
            self.stats[f"save_{save.reason}"] += save.reason is not None
        named = set(news.ended)
        if self._reuse == "result":
            named = {load.id for load in news.loads} | {save.id for save in news.saves}
        for ended in named:
            self.pool.drop(self._held.pop(ended))

    def _schedule(self) -> list[_Request]:
        launched = [request for request in list(self._running) if request.forward is None and self._grow(request)]
        for request in list(self._waiting):
            if len(launched) >= self._batch or not self._fits(request):
                break  # nobody overtakes who waits for blocks
            if self._start(request):
                self._waiting.remove(request)
                self._running.append(request)
                launched.append(request)
        return launched

    def _fits(self, request: _Request) -> bool:
        """Whether it could run to its end; what others still take on their way is not counted, so it may have to start over."""
        pages = -(-(len(request.asked) + request.new_tokens - 1) // self.page_size)
        return self.pool.free >= pages or not self._running

    def _start(self, request: _Request) -> bool:
        """Own blocks, then the cache's, then new ones -> whether its forward pass can be launched."""
        prompt, page = request.prompt, self.page_size
        local = self.pool.cached(self._keys(prompt, (len(prompt) - 1) // page))
        found = self.cache.lookup(prompt, request.rid, len(local) * page)
        if found is None:
            self.stats["lookup_waits"] += 1
            return False
        self.pool.refer(local)
        new = self.pool.take(-(-len(prompt) // page) - len(local))
        if new is None:
            self.pool.drop(local)
            self.cache.finish(request.rid)  # who waits for blocks holds nothing
            self.stats["no_blocks"] += 1
            return False
        request.blocks = local + new
        request.local_tokens = request.computed_tokens = len(local) * page
        request.started = True
        if found:
            self._load(request, new[: found // page])
        return True

    def _load(self, request: _Request, blocks: list[int]) -> None:
        after = self._last if self._after_loads else None
        load = self.cache.load_into(request.rid, blocks, request.computed_tokens, after=after)
        if isinstance(load, Shortfall):
            self.stats[f"load_{load.reason}"] += 1
            return
        self._hold(load.id, blocks)
        self._loading[load.id] = request
        request.load, request.load_agreed = load, False
        request.loaded_tokens = len(blocks) * self.page_size
        request.computed_tokens += request.loaded_tokens

    def _grow(self, request: _Request) -> bool:
        """A block for the next token; without one the request starts over later, and its blocks are others'."""
        need = -(-len(request.prompt) // self.page_size) - len(request.blocks)
        new = self.pool.take(need)
        if new is not None:
            request.blocks += new
            return True
        self.stats["preempted"] += 1
        self._running.remove(request)
        self._give_up(request)
        request.start_over()
        self._waiting.append(request)
        return False

    def _launch(self, request: _Request) -> None:
        """Outside the section: the pass is submitted to the compute thread."""
        start, end = request.computed_tokens, len(request.prompt)
        request.computed = computed = Completion()
        waits = None if request.load_agreed else request.load
        request.forward = self._stream.submit(
            self.model.forward, request.prompt, tuple(request.blocks), start, end, waits
        )
        request.forward.add_done_callback(lambda forward: computed.finish(forward.exception()))
        self._last = computed

    def _settle(self, request: _Request) -> None:
        """Save what is computed, or will be; emit the token when the load under it is agreed."""
        forward = request.forward
        if forward is None:
            return
        if request.load is None or (request.load_agreed and request.load_failed is None):
            self._save(request)  # with the event of a pass that may still run
        if not forward.done() or not request.load_agreed:
            return
        error = forward.exception()
        if error is not None and not isinstance(error, TransferError):
            raise error
        if error is not None or request.load_failed is not None:
            self._running.remove(request)
            self._give_up(request)
            request.start_over()
            request.retries += 1
            self._waiting.append(request)
            return
        request.forward = None
        request.computed_tokens = len(request.prompt)
        whole = request.computed_tokens // self.page_size
        self.pool.publish(self._keys(request.prompt, whole), request.blocks)
        request.tokens.append(forward.result())
        if len(request.tokens) < request.new_tokens:
            request.prompt.append([request.tokens[-1]])
            return
        self._running.remove(request)
        self._give_up(request)
        self.answers[request.rid] = BlockAnswer(
            tuple(request.tokens), request.local_tokens, request.loaded_tokens, request.retries
        )

    def _save(self, request: _Request) -> None:
        whole = len(request.prompt) // self.page_size
        if whole * self.page_size <= request.saved_tokens:
            return
        request.saved_tokens = whole * self.page_size
        blocks = request.blocks[:whole]
        save_id = self.cache.save_from(request.prompt, request.rid, blocks, 0, after=request.computed)
        self._hold(save_id, blocks)

    def _give_up(self, request: _Request) -> None:
        """Its blocks are nobody's but those ids' that they were given to.  A pass that still runs is before all later ones."""
        in_flight = request.forward is not None and not request.forward.done()
        self.cache.finish(request.rid, after=request.computed if in_flight else None)
        self.pool.drop(request.blocks)

    def _hold(self, given: str, blocks: list[int]) -> None:
        self.pool.refer(blocks)
        self._held[given] = list(blocks)

    def _keys(self, prompt: Prompt, pages: int) -> list[bytes]:
        """What a page holds, whatever came before it: the engine's own page hashes."""
        scope, page_bytes = repr(prompt.scope).encode(), self.page_size * TOKEN_BYTES
        return [scope + bytes(prompt.packed[: (at + 1) * page_bytes]) for at in range(pages)]
