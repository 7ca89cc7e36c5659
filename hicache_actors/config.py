"""Settings of a cache: frozen structs that are checked once, when they are made.

What was asked for is done or refused, never rewritten: a value that cannot be honoured raises `ConfigError`, which
names the field, the value, what is allowed and the fix.  ``None`` means "not asked for"; the field's text says what is
done then.  The structs can be made in Python, from a mapping (`Config.from_dict`) or from a TOML or JSON file
(`Config.load`).

Nothing here imports torch or the rest of the package, so a frontend can check a configuration before it owns a GPU.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from hicache_actors.checks import (
    choice,
    count,
    flag,
    not_negative,
    optional_count,
    optional_text,
    positive,
    text,
    whole,
)
from hicache_actors.errors import ConfigError
from hicache_actors.policy_config import EVICTIONS, WRITE_POLICIES, Eviction, PolicyConfig, WritePolicy
from hicache_actors.storage_config import PrefetchPolicy, StorageConfig

__all__ = [
    "LAYOUTS",
    "LOAD_ENGINES",
    "WRITE_BACK_ENGINES",
    "Config",
    "Deadlines",
    "DeviceConfig",
    "Eviction",
    "HostConfig",
    "HostLayout",
    "LoadEngine",
    "ModelFacts",
    "PolicyConfig",
    "PrefetchPolicy",
    "ShapeConfig",
    "StorageConfig",
    "WriteBackEngine",
    "WritePolicy",
]

HostLayout: TypeAlias = Literal["page_first_direct", "page_first", "page_head", "layer_first", "page_unified"]

LAYOUTS: Final = ("page_first_direct", "page_first", "page_head", "layer_first", "page_unified")
HEADER_SIZES: Final = (4096, 0)
HostTouch: TypeAlias = Literal["auto", "ahead", "as_needed"]
TOUCHES: Final[tuple[HostTouch, ...]] = ("auto", "ahead", "as_needed")

LoadEngine: TypeAlias = Literal["auto", "kernel", "direct"]
WriteBackEngine: TypeAlias = Literal["auto", "kernel", "direct", "staged"]

LOAD_ENGINES: Final[tuple[LoadEngine, ...]] = ("auto", "kernel", "direct")
WRITE_BACK_ENGINES: Final[tuple[WriteBackEngine, ...]] = ("auto", "kernel", "direct", "staged")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What, besides shape, page size and layout, must be equal for two caches to share stored bytes."""

    model_id: str | None = None
    """Name of the model.  Required when storage is used.  Default: none."""

    weights: str | None = None
    """Fingerprint of the weights, or an epoch that changes whenever they do.  Required when storage is used.  Default:
    none."""

    total_kv_heads: int | None = None
    """KV heads of the whole model, over all ranks.  Default: the heads of the shape, that is, one rank holds them
    all."""

    first_layer: int | None = None
    """The model's layer that is this rank's first.  Required with unified keys and pipeline stages.  Default: 0."""

    def __post_init__(self) -> None:
        optional_text("model.model_id", self.model_id, fix="name the model, e.g. 'HuggingFaceTB/SmolLM2-135M-Instruct'")
        optional_text("model.weights", self.weights, fix="give a fingerprint of the weights, or an epoch such as 'v1'")
        optional_count("model.total_kv_heads", self.total_kv_heads, "KV heads")
        if self.first_layer is not None:
            whole("model.first_layer", self.first_layer, "layers", least=0)


class ShapeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One token's KV on this rank.  Only needed when the cache makes the KV tensors itself; else they describe
    themselves."""

    layers: int
    """Layers of this rank."""

    heads: int
    """KV heads of this rank; 1 for MLA."""

    head_dim: int
    """Elements a head; for MLA the width of the latent with its rotary part."""

    dtype: str
    """Element type by its torch name, e.g. 'bfloat16'."""

    kv: Literal[1, 2] = 2
    """2: K and V.  1: one MLA tensor a layer.  Default: 2."""

    def __post_init__(self) -> None:
        count("shape.layers", self.layers, "layers")
        count("shape.heads", self.heads, "KV heads")
        count("shape.head_dim", self.head_dim, "elements")
        choice("shape.kv", self.kv, (2, 1), fix="2 for separate K and V, 1 for MLA")
        text("shape.dtype", self.dtype, fix="use a torch name, e.g. 'bfloat16'")


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """L1: the pages that attention reads."""

    pages: int | None = None
    """Pages of the device pool.  Default: as many as the given KV tensors hold; required when none are given."""

    load_engine: LoadEngine = "auto"
    """What copies from the host.  'kernel': threads of the GPU.  'direct': its copy engines; refused where runs are short.
    'auto': by length and number of runs.  Default: 'auto'."""

    write_back_engine: WriteBackEngine = "auto"
    """What copies to the host.  As ``load_engine``, and 'staged': pages are put together in a buffer on the GPU and leave
    it in one piece; needs a layout that keeps pages together.  Default: 'auto'."""

    def __post_init__(self) -> None:
        optional_count("device.pages", self.pages, "pages")
        choice("device.load_engine", self.load_engine, LOAD_ENGINES)
        choice("device.write_back_engine", self.write_back_engine, WRITE_BACK_ENGINES)


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """L2: host memory of this process, one run of page slots.  ``pages`` overrides ``size_gb``, which overrides
    ``ratio``."""

    ratio: float = 2.0
    """Host pages per device page.  Default: 2.0."""

    size_gb: float | None = None
    """Size of the host pool on this rank, headers included, in units of 1e9 bytes.  Default: not given, ``ratio``
    decides."""

    pages: int | None = None
    """Pages of the host pool.  Default: not given, ``size_gb`` or ``ratio`` decides."""

    reserve_gb: float | None = None
    """Memory that must stay free for others, in units of 1e9 bytes; a pool that would take it is refused.  Default:
    the smaller of 10 GiB and 20 % of the memory limit."""

    layout: HostLayout = "page_first_direct"
    """Order of the bytes in a slot.  'page_first_direct': K or V, layer, token, head.  'page_first': K or V, token,
    layer, head, byte-equal to SGLang's flat page.  'page_head': K or V, head, token, layer; not for MLA.  'page_unified':
    group of heads, layer, K or V, token, head, for unified keys.  'layer_first': each layer in one run over all slots; with
    storage, pages are copied once more, through staging slots beside the pool.  Default: 'page_first_direct'."""

    numa_node: int | None = None
    """Take host memory from this NUMA node alone, say that of the GPU.  Needs the native library.  Default: not given, from
    wherever the kernel takes it."""

    touch: HostTouch = "auto"
    """When host memory is touched for the first time, which is when the kernel takes and clears it.  'ahead': from the start,
    by threads of the native library, in the background; `snapshot().host.touched_bytes` says how far they are.  'as_needed':
    each page when it is first filled, which takes longer than the copy.  'auto': 'ahead' for a GPU, which is told of all of
    it before the cache opens, else 'as_needed'.  Default: 'auto'."""

    header_bytes: int = 4096
    """Room for an object header before each page, so that header and page are stored in one run.  0: no header, for raw
    objects or without storage.  Default: 4096."""

    def __post_init__(self) -> None:
        positive("host.ratio", self.ratio, "host pages per device page")
        if self.size_gb is not None:
            positive("host.size_gb", self.size_gb, "GB of 1e9 bytes")
        optional_count("host.pages", self.pages, "pages")
        if self.reserve_gb is not None:
            not_negative("host.reserve_gb", self.reserve_gb, "GB of 1e9 bytes")
        choice("host.layout", self.layout, LAYOUTS)
        choice("host.touch", self.touch, TOUCHES)
        if self.numa_node is not None and (type(self.numa_node) is not int or self.numa_node < 0):
            raise ConfigError(
                "host.numa_node",
                self.numa_node,
                "is no number",
                allowed="integers >= 0, or None",
                fix="name a node, or none",
            )
        choice("host.header_bytes", self.header_bytes, HEADER_SIZES, fix="keep 4096, or 0 without storage")


_LOAD_S: Final = 5.0
_LOAD_SHARE: Final = 0.75  #: of the time of a round: the rest is for the steps around it


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long a copy may take, counted from the moment its events have fired.  Then it ends with what it has."""

    load_s: float | None = None
    """Host to device.  Default: 5 s, or three quarters of `RankGroup.deadline_s` if that is less: a forward pass that waits for a
    load must end before the other ranks give this one up."""

    write_back_s: float = 10.0
    """Device to host.  Default: 10 s."""

    backup_s: float = 30.0
    """Host to storage.  Default: 30 s."""

    def __post_init__(self) -> None:
        if self.load_s is not None:
            positive("deadlines.load_s", self.load_s, "seconds")
        positive("deadlines.write_back_s", self.write_back_s, "seconds")
        positive("deadlines.backup_s", self.backup_s, "seconds")

    def load_limit_s(self, round_s: float | None = None) -> float:
        """``load_s``, or its default where rounds of several ranks have ``round_s`` seconds."""
        if self.load_s is not None:
            return self.load_s
        return _LOAD_S if round_s is None else min(_LOAD_S, _LOAD_SHARE * round_s)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one cache.  Raises `ConfigError` when made of parts that do not fit together."""

    model: ModelFacts = ModelFacts()
    """Facts that decide with whom stored pages are shared."""

    shape: ShapeConfig | None = None
    """Shape of the KV that the cache shall make tensors for.  Default: the given KV tensors describe themselves."""

    page_size: int = 64
    """Tokens in a page, the unit of reuse.  Default: 64 tokens."""

    device: DeviceConfig = DeviceConfig()
    """L1."""

    host: HostConfig = HostConfig()
    """L2."""

    storage: StorageConfig = StorageConfig()
    """L3."""

    write_policy: WritePolicy = "write_through"
    """When a computed page goes to the host and on to storage.  'write_through': at once.  'write_through_selective':
    when a second request uses it.  'write_back': before it would be evicted, ahead of demand.  Default:
    'write_through'."""

    eviction: Eviction = "lru"
    """Who leaves first when a pool is full; never a page before those behind it.  'lru': what was used longest ago.
    'mru': what was used last.  'fifo', 'filo': what came first, last.  'lfu': what the fewest requests have used.
    'slru': what only one request has used, then the rest, each as 'lru'.  'priority': the lowest priority of a request,
    then as 'lru'.  Default: 'lru'."""

    policy: PolicyConfig = PolicyConfig()
    """Numbers that these two go by."""

    deadlines: Deadlines = Deadlines()
    """Limits of copy jobs."""

    enabled: bool = True
    """False: slots are handed out and taken back, and nothing is cached, stored or read.  HICACHE_DISABLED=1 in the
    environment does the same.  Default: True."""

    shadow: bool = False
    """True: what the cache has is loaded and compared with what the engine computes, and nobody is served by it.  Takes
    device pages for both.  Default: False."""

    poison_freed: bool = False
    """For debugging: True fills pages of device and host with bytes of 0xA5 when they become free, so that an engine
    which reads or writes them too late shows.  KV tensors on the CPU only; costs a write of each page.  Default:
    False."""

    close_timeout_s: float = 5.0
    """Time for each stage of closing.  What has not ended then is left, its memory kept mapped, and named.  Default: 5
    s."""

    def __post_init__(self) -> None:
        for name, part in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, part) and not (name == "shape" and value is None):
                raise ConfigError(
                    name,
                    value,
                    f"not a {part.__name__}",
                    allowed=f"a {part.__name__}",
                    fix=f"write {name}={part.__name__}(...), or use Config.from_dict for a mapping",
                )
        count("page_size", self.page_size, "tokens")
        choice("write_policy", self.write_policy, WRITE_POLICIES)
        choice("eviction", self.eviction, EVICTIONS)
        flag("enabled", self.enabled)
        flag("shadow", self.shadow)
        flag("poison_freed", self.poison_freed)
        positive("close_timeout_s", self.close_timeout_s, "seconds")
        self.storage.check_layout(self.host.layout)
        if self.storage.url is not None:
            self.check_storage()

    def check_storage(self) -> None:
        """Raises `ConfigError` if these settings allow no store."""
        for name in ("model_id", "weights"):
            if getattr(self.model, name) is None:
                raise ConfigError(
                    f"model.{name}",
                    None,
                    "missing, but storage is used: bytes of different models must never be mixed",
                    allowed="a non-empty text",
                    fix=f"set model.{name}, or leave storage.url out",
                )
        self.storage.check_header(self.host.header_bytes)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Make a configuration from nested mappings; an unknown key is refused, and the closest known one is named."""
        config = _build(cls, data, "")
        assert isinstance(config, cls)
        return config

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a ``.toml`` or ``.json`` file.  Raises `ConfigError`, also for a file that cannot be read."""
        file = Path(path)
        if file.suffix not in (".toml", ".json"):
            raise ConfigError(
                "file", str(file), "unknown kind of file", allowed=(".toml", ".json"), fix="rename the file"
            )
        try:
            text = file.read_text(encoding="utf-8")
            data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "file", str(file), f"cannot be read: {error}", fix="correct the path or the syntax"
            ) from error
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain mappings, lists, texts and numbers; `from_dict` makes an equal configuration of it."""
        data = msgspec.to_builtins(self)
        assert isinstance(data, dict)
        return data


_PARTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "model": ModelFacts,
    "shape": ShapeConfig,
    "device": DeviceConfig,
    "host": HostConfig,
    "storage": StorageConfig,
    "policy": PolicyConfig,
    "deadlines": Deadlines,
}


def _build(struct: type[msgspec.Struct], data: object, prefix: str) -> msgspec.Struct:
    known = struct.__struct_fields__
    where = prefix.rstrip(".") or "configuration"
    if not isinstance(data, Mapping):
        raise ConfigError(
            where, data, "not a mapping", allowed=f"a mapping with the keys {', '.join(known)}", fix="use a table"
        )
    for key, value in data.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            fix = f"did you mean {prefix + close[0]!r}?" if close else f"remove {prefix}{key}"
            raise ConfigError(f"{prefix}{key}", value, "unknown setting", allowed=known, fix=fix)
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in data:
            name = prefix + field.name
            raise ConfigError(name, None, "missing", allowed="a value; it has no default", fix=f"set {name}")
    values: dict[str, object] = {}
    for name, value in data.items():
        part = _PARTS.get(name) if not prefix else None
        values[name] = value if part is None or (name == "shape" and value is None) else _build(part, value, f"{name}.")
    return struct(**values)
