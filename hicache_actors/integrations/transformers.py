"""Hugging Face transformers 5 on a paged device pool: a forward pass reuses any cached prefix, layer by layer.

::

    engine = PagedModel(model, kv, capacity_tokens=4096)              # once: checks the model, attaches a guard to it
    async with cache.acquire(prompt) as lease:
        lease.allocate(len(prompt) + new - lease.usable_tokens)
        pages = engine.new_cache(lease)                               # once per request
        logits = await lease.run(engine.prefill, token_ids, pages)    # waits for the load of each layer when it gets there
        pages.flush()                                                 # whole pages are in the pool now
        lease.commit(len(prompt))

The prefix is gathered from the pool once per request, into dense tensors that the next request uses again (`Workspace`);
attention reads those.  `PagedCache.flush` hands pages that have been computed over to the pool, before they are committed.

A cache entry is a function of its tokens only if the model saw nothing but those tokens, all of them, at their own positions.
What breaks this (a mask with holes or without the prefix, other positions, a batch, sliding windows) is refused, not served.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from hicache_actors.errors import ConfigError, UsageError
from hicache_actors.integrations.hf_cache import LoadFailed, PagedCache, PagedLease, Workspace
from hicache_actors.integrations.hf_config import check_attention, kv_shape_of, model_facts
from hicache_actors.memory.kv import KVTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["LoadFailed", "PagedCache", "PagedLease", "PagedModel", "Workspace", "kv_shape_of", "model_facts"]

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""How a model's forward names its cache: now, and before transformers 5.24."""


class PagedModel:
    """A causal language model of transformers over the KV tensors of a cache.  Batch size 1.

    ``capacity_tokens`` bounds prompt + generated tokens of one request.  Raises `ConfigError` for a model whose KV a page
    cannot hold: sliding windows, chunked or linear attention, layers that share KV, MLA, or a shape other than ``kv``'s.

    A guard (forward hooks) stays attached to ``model`` until `detach`; passes with other caches are none of its business.
    Workspaces are reused: one goes back when nothing refers to its `PagedCache` any more, so a forward pass that was left
    behind by a cancelled request never shares one.  Any thread.
    """

    def __init__(self, model: PreTrainedModel, kv: KVTensors, *, capacity_tokens: int) -> None:
        check_attention(model.config)
        wanted = kv_shape_of(model.config, page_size=kv.shape.page_size, dtype=str(model.dtype).removeprefix("torch."))
        if wanted != kv.shape:
            raise ConfigError(
                "kv", kv.shape, "another shape than the model's", allowed=repr(wanted), fix="use kv_shape_of(model)"
            )
        if capacity_tokens < kv.shape.page_size:
            raise ConfigError(
                "capacity_tokens", capacity_tokens, "less than one page", allowed="prompt + generated tokens"
            )
        self.model, self.kv, self.capacity_tokens = model, kv, capacity_tokens
        names = inspect.signature(model.forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in names), None)
        if self.cache_argument is None:
            raise ConfigError("model", type(model).__name__, "its forward takes no cache", allowed=CACHE_ARGUMENTS)
        self._short_logits = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._idle: deque[Workspace] = deque()
        # The inner model sees every pass, whether or not the head was called.
        inner = model.base_model
        self._signature = inspect.signature(inner.forward)
        self._hooks = (
            inner.register_forward_pre_hook(self._admit, with_kwargs=True),
            inner.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        )

    def detach(self) -> None:
        """Take the guard off the model; caches made here are refused from then on."""
        for hook in self._hooks:
            hook.remove()

    def new_cache(self, lease: PagedLease, *, load_timeout_s: float = 30.0) -> PagedCache:
        """A cache whose first ``lease.usable_tokens`` come from the lease's pages.

        ``load_timeout_s``: how long a forward pass waits for one layer.
        """
        if lease.usable_tokens > self.capacity_tokens:
            raise UsageError(
                f"the cached prefix has {lease.usable_tokens} tokens, capacity_tokens is {self.capacity_tokens}"
            )
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(self.kv, self.capacity_tokens)
        cache = PagedCache(self.kv, lease, workspace, load_timeout_s)
        weakref.finalize(cache, self._idle.append, workspace).atexit = False
        return cache

    def forward(self, token_ids: Sequence[int], cache: Cache) -> torch.Tensor:
        """Run the next tokens of a sequence -> logits [vocabulary] of the last one.  ``cache`` may be any transformers cache.

        Raises `LoadFailed`; then the cache is spent.
        """
        assert self.cache_argument is not None
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **self._short_logits)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def prefill(self, token_ids: Sequence[int], cache: Cache, chunk_tokens: int = 512) -> torch.Tensor:
        """Run what ``cache`` lacks of a whole prompt, ``chunk_tokens`` at a time -> logits [vocabulary] of the last token."""
        start = cache.get_seq_length()
        if start >= len(token_ids):
            raise UsageError(f"nothing left to compute: the cache holds {start} of {len(token_ids)} tokens")
        for first in range(start, len(token_ids), chunk_tokens):
            logits = self.forward(token_ids[first : first + chunk_tokens], cache)
        return logits

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._signature.bind_partial(*args, **kwargs).arguments if args else kwargs

    def _cache_in(self, arguments: Mapping[str, Any]) -> PagedCache | None:
        for name in CACHE_ARGUMENTS:
            cache = arguments.get(name)
            if isinstance(cache, PagedCache):
                return cache
        return None

    def _admit(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self._arguments(args, kwargs)
        cache = self._cache_in(arguments)
        if cache is None:
            return
        ids = arguments.get("input_ids")
        batch, n_tokens = (ids if ids is not None else arguments["inputs_embeds"]).shape[:2]
        start = cache.get_seq_length()
        _check_mask(arguments.get("attention_mask"), start, n_tokens)
        _check_positions(arguments.get("position_ids"), start, n_tokens)
        cache.begin_forward(batch, n_tokens)

    def _end(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        cache = self._cache_in(self._arguments(args, kwargs))
        if cache is not None:
            cache.end_forward()


def _check_mask(mask: torch.Tensor | None, start: int, n_tokens: int) -> None:
    if mask is None:
        return
    fix = f"pass none, or ones of shape [1, {start + n_tokens}] (cached prefix + new tokens)"
    if mask.ndim != 2:
        raise UsageError(f"attention_mask has shape {list(mask.shape)}: {fix}")
    if mask.shape[1] < start + n_tokens:
        raise UsageError(
            f"attention_mask covers {mask.shape[1]} tokens, not the {start} cached and {n_tokens} new ones: {fix}"
        )
    if not bool(mask.all()):
        raise UsageError(f"attention_mask hides tokens, their pages would depend on more than the tokens: {fix}")


def _check_positions(positions: torch.Tensor | None, start: int, n_tokens: int) -> None:
    if positions is None:
        return
    wanted = torch.arange(start, start + n_tokens, device=positions.device)
    if positions.shape[-1] != n_tokens or not bool((positions == wanted).all()):
        raise UsageError(f"position_ids are not {start}..{start + n_tokens - 1}: leave them out, the cache knows them")
