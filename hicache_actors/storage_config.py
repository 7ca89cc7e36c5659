"""The settings of the storage: which store, when it is read, and how much of it is borne with."""

from __future__ import annotations

import os
from typing import Final, Literal, TypeAlias

import msgspec

from hicache_actors.checks import choice, count, not_negative, optional_count, positive, share, text, whole
from hicache_actors.errors import ConfigError
from hicache_actors.masking import masked

PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]
Verify: TypeAlias = Literal["always", "sampled", "off"]
Keys: TypeAlias = Literal["suffix", "unified", "raw"]
StoreOn: TypeAlias = Literal["publish", "host_evict"]

PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout")
VERIFY_MODES: Final = ("always", "sampled", "off")
KEY_SCHEMES: Final = ("suffix", "unified", "raw")
STORE_ON: Final = ("publish", "host_evict")
MOST_GATHER_S: Final = 1.0


class StorageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """L3: a backend behind a URL, and when to read it."""

    url: str | None = None
    """Where pages are stored: 'file:///folder', 'slab:///folder?gb=200', 'redis://host', or another of docs/stores.md.  Several
    URLs with spaces between are layers, the nearest first.  Default: no storage."""

    keys: Keys = "suffix"
    """How objects are named, and so with whom they are shared.  'suffix': one object a page and rank, for deployments that
    divide the model alike.  'unified': a page is cut along layers and KV heads, for deployments that divide it differently;
    needs host.layout = 'page_unified'.  'raw': SGLang's names, no header; needs host.header_bytes = 0 and verify = 'off'.
    Default: 'suffix'."""

    tp_lcm_size: int | None = None
    """With unified keys: the least common multiple of the tensor-parallel sizes of all deployments that shall share; an
    object then holds the KV heads of the model divided by this.  Default: not given, ``head_group`` decides."""

    head_group: int | None = None
    """With unified keys: KV heads in one object.  Required with more tensor-parallel ranks than KV heads.  Default: those
    of this rank."""

    layer_partition: int | None = None
    """With unified keys: layers in one object; every pipeline stage that shall share begins at a multiple of it.  Default:
    those of this rank."""

    store_on: StoreOn = "publish"
    """When pages are stored.  'publish': as soon as they are on the host, for stores that others read.  'host_evict': before
    they leave the host, for a store that nobody else reads; what is used until then is not written.  Default: 'publish'."""

    store_water_mark: float = 0.75
    """With store_on = 'host_evict': when more than this share of the host pool is in use, the pages that would leave it next
    are stored ahead, until the rest of the pool is free or stored and next to go.  1: only those that ``stored`` and ``drain``
    wait for.  Default: 0.75."""

    gather_s: float = 0.05
    """How long pages that have come to the host wait for others, of later steps and other requests, to be stored as one job:
    each job takes time of the process that running requests feel.  Who waits for them (``stored``, ``drain``, close) ends it.
    0: they are stored at once.  Default: 0.05 s."""

    prefetch_threshold_tokens: int = 256
    """A shorter missing span is not looked up in storage.  Default: 256 tokens."""

    prefetch_policy: PrefetchPolicy = "timeout"
    """When a fetch ends early.  'best_effort': as soon as the request could run.  'wait_complete': never.  'timeout':
    after the time below.  What has arrived counts.  Default: 'timeout'."""

    prefetch_timeout_base_s: float = 1.0
    """Constant part of the timeout, from submission.  Default: 1 s."""

    prefetch_timeout_per_ki_token_s: float = 0.25
    """Part of the timeout per 1,024 tokens asked for.  Default: 0.25 s."""

    prefetch_timeout_max_s: float = 30.0
    """The timeout is never longer.  Default: 30 s."""

    read_concurrency: int = 4
    """Batches read at once, and four times as many lookups.  Default: 4."""

    write_concurrency: int = 2
    """Batches written at once; while reads wait for their turn, one.  Default: 2."""

    read_in_flight_bytes: int = 256 * 2**20
    """Bytes that reads may have under way; more wait, by request priority, then age.  Default: 256 MiB."""

    write_in_flight_bytes: int = 128 * 2**20
    """Bytes that writes may have under way, and as many waiting; beyond that they are shed.  Default: 128 MiB."""

    query_timeout_s: float = 2.0
    """How long a lookup may take at the store.  A call that takes longer is hung: nobody waits for it any more, the
    memory that it touches is held until it returns.  Default: 2 s."""

    read_timeout_s: float = 5.0
    """How long the read of a batch may take at the store.  Default: 5 s."""

    write_timeout_s: float = 10.0
    """How long the write of a batch may take at the store.  Default: 10 s."""

    max_hung_calls: int = 4
    """Hung calls of one direction (lookups, reads, writes); with so many it refuses at once, until one returns.
    Default: 4."""

    shed_latency_s: float = 2.0
    """While the reads of a batch take longer than this on average, nothing is written.  Default: 2 s."""

    breaker_failures: int = 2
    """Failures or timeouts of one direction in a row after which it is not asked any more, for a time.  Default: 2."""

    breaker_delay_s: float = 1.0
    """After this time one call tries whether the store is back; doubled each time that it is not.  Default: 1 s."""

    breaker_max_delay_s: float = 30.0
    """That time is never longer.  Default: 30 s."""

    verify: Verify = "always"
    """Which pages that were read are compared with the checksum in their header before they can be used.  'always': each.
    'sampled': one in ``verify_every``.  'off': none.  The rest of the header is compared always.  Default: 'always'."""

    verify_every: int = 16
    """With verify = 'sampled': one page in so many, chosen at random.  Default: 16."""

    scrub_mb_s: float = 0.0
    """Megabytes (1e6 bytes) a second that are read in the background, while nobody else reads, to find bad objects before
    they are needed.  0: none.  Default: 0."""

    probe_keys: int = 4096
    """Names that are listed when a store is attached, to warn of pages of the same model that cannot be shared.  0: none.
    Default: 4096."""

    def __repr__(self) -> str:
        """Without the secrets of its URL: configurations end up in logs."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return masked(f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})")

    def __post_init__(self) -> None:
        if self.url is not None:
            text("storage.url", self.url, fix="use e.g. 'memory://demo' or 'file:///var/cache/kv'")
            scheme, separator, _ = self.url.partition("://")
            if not separator or not scheme:
                raise ConfigError(
                    "storage.url",
                    self.url,
                    "not a URL: it has no scheme",
                    allowed="scheme://rest, e.g. 'memory://demo', 'file:///var/cache/kv'",
                    fix=f"for a folder write 'file://{os.path.abspath(self.url)}'",
                )
        choice("storage.store_on", self.store_on, STORE_ON)
        share("storage.store_water_mark", self.store_water_mark, "the host pool")
        not_negative("storage.gather_s", self.gather_s, "seconds")
        if self.gather_s > MOST_GATHER_S:
            raise ConfigError(
                "storage.gather_s",
                self.gather_s,
                "pages that wait hold their place on the host",
                allowed=f"0 to {MOST_GATHER_S} seconds",
                fix="use the default, or 'host_evict' for storage.store_on to store much later",
            )
        whole("storage.prefetch_threshold_tokens", self.prefetch_threshold_tokens, "tokens", least=0)
        choice("storage.prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        not_negative("storage.prefetch_timeout_base_s", self.prefetch_timeout_base_s, "seconds")
        not_negative("storage.prefetch_timeout_per_ki_token_s", self.prefetch_timeout_per_ki_token_s, "seconds")
        positive("storage.prefetch_timeout_max_s", self.prefetch_timeout_max_s, "seconds")
        if self.prefetch_timeout_max_s < self.prefetch_timeout_base_s:
            raise ConfigError(
                "storage.prefetch_timeout_max_s",
                self.prefetch_timeout_max_s,
                f"shorter than prefetch_timeout_base_s = {self.prefetch_timeout_base_s!r}",
                allowed="prefetch_timeout_base_s or more, in seconds",
                fix="raise the maximum or lower the base",
            )
        count("storage.read_concurrency", self.read_concurrency, "batches")
        count("storage.write_concurrency", self.write_concurrency, "batches")
        self._check_limits()
        choice("storage.verify", self.verify, VERIFY_MODES)
        count("storage.verify_every", self.verify_every, "pages")
        not_negative("storage.scrub_mb_s", self.scrub_mb_s, "1e6 bytes a second")
        whole("storage.probe_keys", self.probe_keys, "names", least=0)
        self._check_keys()

    def _check_keys(self) -> None:
        choice("storage.keys", self.keys, KEY_SCHEMES)
        for name in ("tp_lcm_size", "head_group", "layer_partition"):
            value = getattr(self, name)
            optional_count(f"storage.{name}", value, "ranks" if name == "tp_lcm_size" else name.split("_")[0] + "s")
            if value is not None and self.keys != "unified":
                raise ConfigError(
                    f"storage.{name}",
                    value,
                    f"has no meaning with keys = {self.keys!r}",
                    allowed="not given, or keys = 'unified'",
                    fix=f"set storage.keys = 'unified', or leave {name} out",
                )
        if self.keys == "raw" and self.verify != "off":
            raise ConfigError(
                "storage.verify",
                self.verify,
                "raw objects have no checksum, but keys = 'raw'",
                allowed="'off' with raw keys",
                fix="set storage.verify = 'off', or choose other keys",
            )
        if self.keys == "raw" and self.scrub_mb_s:
            raise ConfigError(
                "storage.scrub_mb_s",
                self.scrub_mb_s,
                "raw objects have no checksum, but keys = 'raw'",
                allowed="0 with raw keys",
                fix="leave it out",
            )

    def check_header(self, header_bytes: int) -> None:
        """Raises `ConfigError` if objects cannot be stored from slots with so much room for a header."""
        raw = self.keys == "raw"
        if raw != (header_bytes == 0):
            raise ConfigError(
                "host.header_bytes",
                header_bytes,
                "SGLang's objects have no header, but keys = 'raw'" if raw else "no room for the header of an object",
                allowed="0 with raw keys" if raw else "4096 with storage",
                fix="set host.header_bytes = 0" if raw else "leave header_bytes at 4096, or set storage.keys = 'raw'",
            )

    def check_layout(self, layout: str) -> None:
        """Raises `ConfigError` if slots of this layout are not cut as the keys say."""
        unified = self.keys == "unified"
        if unified != (layout == "page_unified"):
            raise ConfigError(
                "host.layout",
                layout,
                f"does not go with storage.keys = {self.keys!r}",
                allowed="'page_unified' with unified keys, and with no others",
                fix="set host.layout = 'page_unified'" if unified else "set storage.keys = 'unified'",
            )

    def _check_limits(self) -> None:
        for name in ("read_in_flight_bytes", "write_in_flight_bytes"):
            count(f"storage.{name}", getattr(self, name), "bytes")
        for name in ("query_timeout_s", "read_timeout_s", "write_timeout_s", "shed_latency_s", "breaker_delay_s"):
            positive(f"storage.{name}", getattr(self, name), "seconds")
        count("storage.max_hung_calls", self.max_hung_calls, "calls")
        count("storage.breaker_failures", self.breaker_failures, "failures")
        positive("storage.breaker_max_delay_s", self.breaker_max_delay_s, "seconds")
        if self.breaker_max_delay_s < self.breaker_delay_s:
            raise ConfigError(
                "storage.breaker_max_delay_s",
                self.breaker_max_delay_s,
                f"shorter than breaker_delay_s = {self.breaker_delay_s!r}",
                allowed="breaker_delay_s or more, in seconds",
                fix="raise the maximum or lower the delay",
            )

    @property
    def query_concurrency(self) -> int:
        """Lookups at once: they move nothing, and wait for the store more than it works on them."""
        return 4 * self.read_concurrency

    def prefetch_timeout_s(self, n_tokens: int) -> float | None:
        """How long a fetch of ``n_tokens`` may take from its submission; None: the policy sets no time."""
        if self.prefetch_policy != "timeout":
            return None
        wanted_s = self.prefetch_timeout_base_s + self.prefetch_timeout_per_ki_token_s * n_tokens / 1024
        return min(wanted_s, self.prefetch_timeout_max_s)
