"""``hicache plan``: how much a model's KV takes, and how many tokens and sessions fit into tiers of given sizes.

Computes only: it looks at no GPU, no disk and not at this machine's memory, so it can plan for another one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hicache_actors.cache.key_choice import layout_of
from hicache_actors.checks import count, positive
from hicache_actors.command.modelfile import ModelShape, dtype_name, read_model
from hicache_actors.config import LAYOUTS, Config
from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import Rank
from hicache_actors.masking import masked
from hicache_actors.memory.budget import HostBudget, host_budget, host_memory_scope, host_pages
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.limits import MemoryLimit
from hicache_actors.memory.places import place_of
from hicache_actors.memory.report import SizingReport, sizing_report
from hicache_actors.memory.shapes import KVShape
from hicache_actors.memory.staging import StagingSize, staging_size, take_staging
from hicache_actors.memory.traps import StorageFacts, Trap

CONTEXTS_TOKENS: Final = (8192, 32768)

HELP: Final = """\
Says how many bytes a token of KV takes, and how many tokens and sessions fit into tiers of given sizes.  The model is given
by its config.json, by its shape, or by a configuration of this package.  Sizes in GB are 1e9 bytes and one rank's, except
for --disk-gb and --memory-gb, which all ranks of a host share.
"""

EPILOG: Final = """\
examples:
  hicache plan --layers 80 --kv-heads 8 --head-dim 128 --dtype fp16
  hicache plan --model ./Qwen3-32B --tp 4 --device-gb 40 --host-gb 200 --disk-gb 4000
  hicache plan --layers 61 --mla --head-dim 576 --device-gb 30 --prefill-tokens-per-s 20000
  hicache plan --config cache.toml --json
"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelShape
    tp: int
    contexts_tokens: tuple[int, ...]
    report: SizingReport

    def sessions(self, tier_pages: int, context_tokens: int) -> int:
        """How many sessions of that length fit at once; each takes whole pages."""
        return tier_pages // -(-context_tokens // self.report.layout.shape.page_size)

    def lines(self) -> list[str]:
        whole, rank = self.model.token_bytes, self.report.layout.shape.token_bytes
        words = [self.model.describe(), f"KV takes {self._growth(whole)}"]
        if self.tp > 1:
            copies = self.model.copies(self.tp)
            shared = f" ({copies} ranks hold the same)" if copies > 1 else ""
            words.append(f"each of {self.tp} ranks takes {self._growth(rank)}{shared}")
        words += [f"assumed: {remark}" for remark in self.model.remarks]
        words += ["", *self.report.lines()]
        if self.report.tiers:
            words += ["", *self._table()]
        return words

    def to_dict(self) -> dict[str, Any]:
        rank_bytes = self.report.layout.shape.token_bytes
        return {
            "model": {**msgspec.to_builtins(self.model), "token_bytes": self.model.token_bytes},
            "tp": self.tp,
            "contexts": [
                {"tokens": n, "bytes": n * self.model.token_bytes, "rank_bytes": n * rank_bytes}
                for n in self.contexts_tokens
            ],
            "sessions": {
                tier.tier: {str(n): self.sessions(tier.pages, n) for n in self.contexts_tokens}
                for tier in self.report.tiers
            },
            **self.report.to_dict(),
        }

    def _growth(self, token_bytes: int) -> str:
        sizes = ", ".join(f"{binary(n * token_bytes)} at {context_name(n)}" for n in self.contexts_tokens)
        return f"{binary(token_bytes)} a token, {sizes}"

    def _table(self) -> list[str]:
        head = "sessions" + "".join(f"{'of ' + context_name(n):>12}" for n in self.contexts_tokens)
        return [
            head,
            *(
                f"{tier.tier:8}" + "".join(f"{self.sessions(tier.pages, n):>12,}" for n in self.contexts_tokens)
                for tier in self.report.tiers
            ),
        ]


def make_plan(
    config: Config,
    model: ModelShape,
    *,
    tp: int = 1,
    device_gb: float | None = None,
    disk_gb: float | None = None,
    memory_gb: float | None = None,
    ranks_per_host: int | None = None,
    contexts_tokens: Sequence[int] = (),
    prefill_tokens_per_s: float | None = None,
    disk_read_gb_s: float | None = None,
) -> Plan:
    """``ranks_per_host``: by default all of them.  Raises `ConfigError`."""
    ranks = ranks_per_host or tp
    facts = msgspec.structs.replace(config.model, total_kv_heads=model.kv_heads)
    config = msgspec.structs.replace(config, model=facts)
    shape = model.rank_shape(config.page_size, tp)
    device_pages = config.device.pages if device_gb is None else _device_pages(device_gb, shape)
    storage = _storage(config, disk_gb, disk_read_gb_s, 1 if model.mla else ranks)
    layout = layout_of(config, shape, Rank(tp_size=tp))
    host, staging = _host(config, layout, device_pages, memory_gb, ranks, storage=storage is not None)
    report = sizing_report(
        config,
        shape,
        layout=layout,
        device_pages=device_pages,
        host=host,
        staging=staging,
        storage=storage,
        ranks=ranks,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    contexts = set(contexts_tokens) or {*CONTEXTS_TOKENS, model.max_context_tokens or CONTEXTS_TOKENS[0]}
    plan = Plan(model=model, tp=tp, contexts_tokens=tuple(sorted(contexts)), report=report)
    return plan if device_pages is None else _with_context_trap(plan, device_pages)


def binary(n_bytes: int) -> str:
    """Units of 1,024, at most two decimals: "320 KiB", "2.5 GiB"."""
    size, unit = float(n_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    text = f"{size:,.2f}".rstrip("0").rstrip(".")
    return f"{text} {unit}"


def context_name(n_tokens: int) -> str:
    for size, unit in ((2**20, "M"), (1024, "K")):
        if n_tokens % size == 0:
            return f"{n_tokens // size}{unit}"
    return f"{n_tokens:,}"


def context_tokens(text: str) -> int:
    """ "8192", "32K" or "1M" -> tokens.  Raises ArgumentTypeError, which argparse shows."""
    unit = {"K": 1024, "M": 2**20}.get(text[-1:].upper(), 1)
    number = text if unit == 1 else text[:-1]
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of tokens; write e.g. 8192, 32K or 1M")
    return int(number) * unit


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model: its config.json, or its shape")
    model.add_argument("--model", type=Path, metavar="PATH", help="config.json, or the folder that holds it")
    model.add_argument("--layers", type=int, metavar="N")
    model.add_argument("--kv-heads", type=int, metavar="N", help="KV heads of the whole model")
    model.add_argument("--head-dim", type=int, metavar="N", help="with --mla: latent and rotary part together")
    model.add_argument("--mla", action="store_true", help="one latent a token and layer, as DeepSeek keeps")
    model.add_argument("--dtype", metavar="NAME", help="of the KV (default: the model's, or bfloat16)")
    model.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    cache = parser.add_argument_group("the cache")
    cache.add_argument("--config", type=Path, metavar="FILE", help="start from this configuration (.toml or .json)")
    cache.add_argument("--page-size", type=int, metavar="TOKENS")
    cache.add_argument("--layout", choices=LAYOUTS)
    cache.add_argument("--raw", action="store_true", help="slots without headers")
    sizes = parser.add_argument_group("the sizes")
    sizes.add_argument("--device-gb", type=float, metavar="GB", help="KV pool of a rank's device")
    sizes.add_argument("--host-gb", type=float, metavar="GB", help="host pool of a rank")
    sizes.add_argument("--host-ratio", type=float, metavar="X", help="host pages per device page (default 2)")
    sizes.add_argument("--disk-gb", type=float, metavar="GB", help="storage of a host")
    sizes.add_argument(
        "--memory-gb", type=float, metavar="GB", help="memory of a host: refuse a pool that is too large"
    )
    sizes.add_argument("--ranks-per-host", type=int, metavar="N", help="default: all ranks on one host")
    sizes.add_argument(
        "--context",
        type=context_tokens,
        action="append",
        default=[],
        metavar="TOKENS",
        help="e.g. 32K; may be repeated",
    )
    speed = parser.add_argument_group("the speeds")
    speed.add_argument("--prefill-tokens-per-s", type=float, metavar="N", help="as measured: makes break-even a number")
    speed.add_argument("--disk-read-gb-s", type=float, metavar="X", help="as measured: is storage worth it?")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print a plan -> exit code.  Raises `ConfigError`."""
    for name in ("tp", "ranks_per_host"):
        if getattr(options, name) is not None:
            count(name, getattr(options, name), "ranks")
    for name in (
        "device_gb",
        "host_gb",
        "host_ratio",
        "disk_gb",
        "memory_gb",
        "prefill_tokens_per_s",
        "disk_read_gb_s",
    ):
        if getattr(options, name) is not None:
            positive(name, getattr(options, name), "")
    config = _config(options)
    plan = make_plan(
        config,
        _model(options, config),
        tp=options.tp,
        device_gb=options.device_gb,
        disk_gb=options.disk_gb,
        memory_gb=options.memory_gb,
        ranks_per_host=options.ranks_per_host,
        contexts_tokens=options.context,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        disk_read_gb_s=options.disk_read_gb_s,
    )
    print(json.dumps(plan.to_dict(), indent=2) if options.json else "\n".join(plan.lines()))
    return 0


def _config(options: argparse.Namespace) -> Config:
    """The configuration with what the command line says in its place."""
    data = Config() if options.config is None else Config.load(options.config)
    base = data.to_dict()
    host: dict[str, object] = base["host"]
    if options.host_ratio is not None:
        host.update(ratio=options.host_ratio, size_gb=None, pages=None)
    if options.host_gb is not None:
        host.update(size_gb=options.host_gb, pages=None)
    _put(host, layout=options.layout, header_bytes=0 if options.raw else None)
    _put(base, page_size=options.page_size)
    return Config.from_dict(base)


def _put(target: dict[str, Any], **values: object) -> None:
    target.update({name: value for name, value in values.items() if value is not None})


def _model(options: argparse.Namespace, config: Config) -> ModelShape:
    dtype = None if options.dtype is None else dtype_name(options.dtype)
    numbers: Mapping[str, int | None] = {
        "layers": options.layers,
        "kv_heads": 1 if options.mla and options.kv_heads is None else options.kv_heads,
        "head_dim": options.head_dim,
    }
    if options.mla and options.kv_heads not in (None, 1):
        raise ConfigError(
            "kv_heads", options.kv_heads, "a latent has no heads", allowed="1 with --mla", fix="leave --kv-heads out"
        )
    given = [name for name, value in numbers.items() if value is not None and not (options.mla and name == "kv_heads")]
    if options.model is not None:
        if given or options.mla:
            raise ConfigError("model", str(options.model), "a shape was given as well", fix="give one of them")
        return read_model(options.model, dtype=dtype)
    if not given and config.shape is not None:
        return _model_of(config, options.tp, dtype)
    for name, value in numbers.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            fix = f"give --model, or {flag} and the rest of the shape"
            raise ConfigError(name, None, "missing", allowed="integers >= 1", fix=fix)
        count(name, value, "")
    return ModelShape(
        name="given shape",
        layers=options.layers,
        kv_heads=numbers["kv_heads"] or 1,
        head_dim=options.head_dim,
        dtype=dtype or "bfloat16",
        mla=options.mla,
    )


def _model_of(config: Config, tp: int, dtype: str | None) -> ModelShape:
    """A configuration's shape is one rank's, so the model has ``tp`` times its heads."""
    shape = config.shape
    assert shape is not None
    mla = shape.kv == 1
    return ModelShape(
        name=config.model.model_id or "configured shape",
        layers=shape.layers,
        kv_heads=shape.heads if mla else config.model.total_kv_heads or shape.heads * tp,
        head_dim=shape.head_dim,
        dtype=dtype or dtype_name(shape.dtype),
        mla=mla,
    )


def _device_pages(device_gb: float, shape: KVShape) -> int:
    pages = int(device_gb * 1e9) // shape.page_bytes
    if pages < 1:
        raise ConfigError(
            "device_gb",
            device_gb,
            f"leaves no room for a page of {shape.page_bytes:,} bytes",
            allowed=f"at least {shape.page_bytes / 1e9:.6f} GB",
        )
    return pages


def _host(
    config: Config, layout: SlotLayout, device_pages: int | None, memory_gb: float | None, ranks: int, *, storage: bool
) -> tuple[HostBudget | int | None, StagingSize | None]:
    host = config.host
    if device_pages is None and host.size_gb is None and host.pages is None:
        return None, None
    if memory_gb is None:
        pages, _ = host_pages(
            layout, device_pages or 0, pages=host.pages, size_gb=host.size_gb, ratio=host.ratio, storage=storage
        )
        return pages, staging_size(layout, pages, config.storage)
    n_bytes = int(memory_gb * 1e9)
    with host_memory_scope(MemoryLimit(n_bytes, n_bytes), ranks=ranks):
        budget = host_budget(
            layout,
            device_pages or 0,
            pages=host.pages,
            size_gb=host.size_gb,
            ratio=host.ratio,
            reserve_gb=host.reserve_gb,
            storage=storage,
        )
        return budget, take_staging(layout, budget.pages, config.storage, reserve_gb=host.reserve_gb)


def _storage(config: Config, disk_gb: float | None, read_gb_s: float | None, owners: int) -> StorageFacts | None:
    url = config.storage.url
    if disk_gb is None and url is None:
        return None
    place = None if url is None or len(url.split()) > 1 else place_of(url)
    return StorageFacts(
        masked(url or "the disk"),
        None if disk_gb is None else int(disk_gb * 1e9),
        read_bytes_s=None if read_gb_s is None else read_gb_s * 1e9,
        ranks=owners,
        cap_bytes=None if place is None else place.cap_bytes,
    )


def _with_context_trap(plan: Plan, device_pages: int) -> Plan:
    shape, longest = plan.report.layout.shape, plan.contexts_tokens[-1]
    if longest <= device_pages * shape.page_size:
        return plan
    trap = Trap(
        "context_over_device",
        "note",
        "device.pages",
        f"a request of {context_name(longest)} tokens does not fit into the device pool of "
        f"{device_pages * shape.page_size:,} tokens: attention reads the device only, so it cannot be served",
        "enlarge the device pool, or admit shorter requests only",
    )
    return msgspec.structs.replace(plan, report=msgspec.structs.replace(plan.report, traps=(*plan.report.traps, trap)))
