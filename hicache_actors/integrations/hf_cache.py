"""A transformers cache over the pages of one lease.  Users import `hicache_actors.integrations.transformers`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch

from hicache_actors.errors import HiCacheError, MissingExtraError, UsageError
from hicache_actors.memory.kv import KVTensors

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error


class LoadFailed(HiCacheError):
    """The load under a `PagedCache` failed or took too long.  No token may come of it: await the load's verdict, release the lease,
    and acquire again (until the verdict is agreed a new lease would join the load that is failing).
    """


class LayerLoad(Protocol):
    """What `PagedCache` needs of a load."""

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block this thread until the layer's pages are in the pool -> False if they will not be, or not in time."""


class PagedLease(Protocol):
    """What `PagedCache` needs of a lease.  ``pages``: device pages in prompt order; the first hold ``usable_tokens``."""

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def usable_tokens(self) -> int: ...

    @property
    def loading(self) -> LayerLoad | None: ...


class Workspace:
    """Dense K and V of one running request: per layer two tensors [1, heads, capacity_tokens, head_dim]."""

    def __init__(self, kv: KVTensors, capacity_tokens: int) -> None:
        shape = kv.shape
        like = kv.layer(0)[0]
        # Inference tensors could not be written by a pass under no_grad, so these are made as ordinary ones wherever we are.
        with torch.inference_mode(False):
            self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
                (
                    like.new_zeros(1, shape.heads, capacity_tokens, shape.head_dim),
                    like.new_zeros(1, shape.heads, capacity_tokens, shape.head_dim),
                )
                for _ in range(shape.layers)
            ]
        self.capacity_tokens = capacity_tokens


class _Request:
    """What the layers of one cache share.  Apart from the cache, so that no reference cycle keeps a workspace busy."""

    def __init__(self, page_size: int, load: LayerLoad | None, timeout_s: float) -> None:
        self.page_size, self.load, self.timeout_s = page_size, load, timeout_s
        self.admitted_tokens = 0  # of the forward pass under way; 0 outside
        self.wait_s = 0.0
        self.failed: str | None = None

    def wait_for(self, layer: int) -> None:
        if self.load is None:
            return
        started = time.perf_counter()
        try:
            arrived = self.load.wait(layer, self.timeout_s)
        except HiCacheError as error:
            raise self.fail(layer) from error
        finally:
            self.wait_s += time.perf_counter() - started
        if not arrived:
            raise self.fail(layer)

    def fail(self, layer: int) -> LoadFailed:
        self.failed = (
            f"layer {layer} of the cached prefix did not arrive (failed, or not within {self.timeout_s} s); "
            "this cache is discarded: await the verdict, release the lease, acquire again"
        )
        return LoadFailed(self.failed)

    def check(self) -> None:
        if self.failed is not None:
            raise LoadFailed(self.failed)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotations
    """K and V of one model layer.  Its length counts the prefix from the start, before it has arrived: positions and masks
    are made first."""

    is_sliding = False

    def __init__(
        self,
        index: int,
        pool: tuple[torch.Tensor, ...],
        dense: tuple[torch.Tensor, ...],
        prefix: torch.Tensor,
        request: _Request,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.pool, self.dense, self.request = index, pool, dense, request
        self.n_tokens = len(prefix) * request.page_size
        self._prefix: torch.Tensor | None = prefix if len(prefix) else None  # None once gathered
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to make."""

    def get_seq_length(self) -> int:
        return self.n_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_tokens + query_length, 0

    def get_max_length(self) -> int:
        return self.dense[0].shape[2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take K and V [1, heads, n, head_dim] of n tokens -> those of all tokens so far.  Called by the model's attention."""
        n = key_states.shape[-2]
        if n != self.request.admitted_tokens:
            raise UsageError(
                f"layer {self.index} got {n} tokens, {self.request.admitted_tokens} were announced: "
                "call the model that was given to PagedModel (or a module that contains it), not a part of it"
            )
        self.gather()
        end = self.n_tokens + n
        for dense, new in zip(self.dense, (key_states, value_states), strict=True):
            dense[:, :, self.n_tokens : end].copy_(new)
        self.n_tokens = end
        return self.dense[0][:, :, :end], self.dense[1][:, :, :end]

    def gather(self) -> None:
        """Wait for this layer's load and copy the prefix into the dense tensors, once."""
        if self._prefix is None:
            return
        self.request.wait_for(self.index)
        n_pages, page_size = len(self._prefix), self.request.page_size
        for pool, dense in zip(self.pool, self.dense, strict=True):
            _paged(dense, 0, n_pages, page_size).copy_(pool.index_select(0, self._prefix).permute(2, 0, 1, 3))
        self._prefix = None

    def scatter(self, pages: torch.Tensor, first_page: int) -> None:
        """Copy tokens from ``first_page`` on into ``pages`` of the pool."""
        for pool, dense in zip(self.pool, self.dense, strict=True):
            source = _paged(dense, first_page, len(pages), self.request.page_size)
            pool.index_copy_(0, pages, source.permute(1, 2, 0, 3).contiguous())


def _paged(dense: torch.Tensor, first_page: int, n_pages: int, page_size: int) -> torch.Tensor:
    """Whole pages of a dense tensor, as a view [heads, pages, page_size, head_dim]."""
    tokens = dense[0, :, first_page * page_size : (first_page + n_pages) * page_size]
    return tokens.view(dense.shape[1], n_pages, page_size, dense.shape[3])


class PagedCache(Cache):
    """A transformers cache over the pages of one lease.  Made by `PagedModel.new_cache`.

    One request, one forward pass at a time, any thread.  Everything that would make two caches of one, or unwind it, is
    refused with `UsageError`.  After `LoadFailed` it is discarded: each further use raises `LoadFailed`.
    """

    def __init__(self, kv: KVTensors, lease: PagedLease, workspace: Workspace, load_timeout_s: float) -> None:
        page_size = kv.shape.page_size
        prefix_pages, odd_tokens = divmod(lease.usable_tokens, page_size)
        if odd_tokens:
            raise UsageError(f"the lease offers {lease.usable_tokens} tokens, no multiple of the page size {page_size}")
        self._lease, self._workspace = lease, workspace
        self._request = _Request(page_size, lease.loading, load_timeout_s)
        self._flushed_pages = prefix_pages
        self.prefix_tokens = lease.usable_tokens
        self._device = kv.device
        prefix = self._page_index(0, prefix_pages)
        self.paged_layers = [
            PagedLayer(index, kv.layer(index), dense, prefix, self._request)
            for index, dense in enumerate(workspace.layers)
        ]
        super().__init__(layers=list(self.paged_layers))

    @property
    def wait_s(self) -> float:
        """How long forward passes have waited for layers that were still being loaded."""
        return self._request.wait_s

    def begin_forward(self, batch: int, n_tokens: int) -> None:
        """Admit a forward pass over the next ``n_tokens``; called by the guard of `PagedModel`.  Changes nothing if it raises."""
        self._request.check()
        if batch != 1:
            raise UsageError(
                f"a PagedCache serves one request, this batch has {batch}: call the model once per request"
            )
        if torch.is_grad_enabled():
            raise UsageError(
                "gradients are enabled, the graph would hang on the reused workspace: call the model within torch.inference_mode()"
            )
        lengths = {layer.n_tokens for layer in self.paged_layers}
        if len(lengths) > 1:
            raise UsageError("an earlier forward pass ended between two layers: discard this cache and acquire again")
        end = self.paged_layers[0].n_tokens + n_tokens
        if end > self._workspace.capacity_tokens:
            raise UsageError(
                f"{end} tokens, but the workspace holds {self._workspace.capacity_tokens}: "
                "give PagedModel a larger capacity_tokens"
            )
        self._request.admitted_tokens = n_tokens

    def end_forward(self) -> None:
        """The admitted pass has ended; called by the guard."""
        self._request.admitted_tokens = 0

    def flush(self) -> int:
        """Copy whole pages that were computed since into the lease's pages -> tokens that are in the pool now.

        Call before `lease.commit`, on a thread that may block for a copy (about 0.2 ms a layer for 1,024 tokens).
        """
        self._request.check()
        n_pages = min(layer.n_tokens for layer in self.paged_layers) // self._request.page_size
        if n_pages > len(self._lease.pages):
            raise UsageError(
                f"{n_pages} pages are computed, the lease holds {len(self._lease.pages)}: allocate before the forward pass"
            )
        if n_pages > self._flushed_pages:
            pages = self._page_index(self._flushed_pages, n_pages)
            for layer in self.paged_layers:
                layer.scatter(pages, self._flushed_pages)
            self._flushed_pages = n_pages
        return n_pages * self._request.page_size

    def _page_index(self, first: int, last: int) -> torch.Tensor:
        return torch.tensor(list(self._lease.pages[first:last]), dtype=torch.int64, device=self._device)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a PagedCache cannot be copied or pickled: it would take the whole pool along; acquire another lease"
        )

    def crop(self, tokens_to_remove: int) -> NoReturn:
        self._refuse("crop", "use a DynamicCache for speculative or contrastive decoding")

    def reset(self) -> NoReturn:
        self._refuse("reset", "take a new cache from PagedModel.new_cache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        self._refuse("reorder_cache", "decode without beams (num_beams=1)")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        self._refuse("batch_repeat_interleave", "decode one sequence (num_return_sequences=1, num_beams=1)")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        self._refuse("batch_select_indices", "decode one sequence")

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise UsageError(f"a PagedCache does not support {what}: {fix}")
