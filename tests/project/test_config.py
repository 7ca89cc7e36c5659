"""Every refusal names the field, the value, what is allowed and the fix."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache_actors.config import (
    Config,
    Deadlines,
    DeviceConfig,
    HostConfig,
    ModelFacts,
    PolicyConfig,
    ShapeConfig,
    StorageConfig,
)
from hicache_actors.core import config as core_config
from hicache_actors.core import order
from hicache_actors.errors import ConfigError
from hicache_actors.policy_config import EVICTIONS, WRITE_POLICIES

FACTS = ModelFacts(model_id="toy", weights="v1")
STORED = StorageConfig(url="memory://a")
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "head_dim": 8, "dtype": "float32"}

PARTS: dict[str, type[msgspec.Struct]] = {
    "": Config,
    "model": ModelFacts,
    "shape": ShapeConfig,
    "device": DeviceConfig,
    "host": HostConfig,
    "storage": StorageConfig,
    "policy": PolicyConfig,
    "deadlines": Deadlines,
}

# (field, value, a text that `allowed` must hold, a text that `fix` must hold)
REFUSALS: list[tuple[str, object, str, str]] = [
    ("page_size", 0, "1 or more tokens", "at least 1"),
    ("page_size", True, "1 or more tokens", "int"),
    ("page_size", 64.0, "1 or more tokens", "int"),
    ("write_policy", "write_thru", "'write_through'", "did you mean 'write_through'?"),
    ("eviction", "random", "'lru'", "use 'lru'"),
    ("write_policy", "write_bak", "'write_back'", "did you mean 'write_back'?"),
    ("policy", "lru", "PolicyConfig", "Config.from_dict"),
    ("policy.selective_threshold", 0, "1 or more requests", "at least 1"),
    ("policy.slru_protected_hits", 1.5, "1 or more requests", "int"),
    ("policy.write_back_water_mark", 75, "from 0 to 1", "0.25"),
    ("policy.write_back_dirty_cap", "0.25", "from 0 to 1", "float"),
    ("enabled", "no", "True", "bool"),
    ("shadow", 1, "True", "bool"),
    ("poison_freed", 1, "True", "bool"),
    ("close_timeout_s", 0, "more than 0 seconds", "positive"),
    ("model", "toy", "ModelFacts", "Config.from_dict"),
    ("shape", SHAPE, "ShapeConfig", "Config.from_dict"),
    ("device", None, "DeviceConfig", "Config.from_dict"),
    ("host", {"ratio": 1}, "HostConfig", "Config.from_dict"),
    ("storage", "memory://a", "StorageConfig", "Config.from_dict"),
    ("deadlines", 5, "Deadlines", "Config.from_dict"),
    ("model.model_id", " ", "non-empty text", "name the model"),
    ("model.weights", 7, "non-empty text", "fingerprint"),
    ("model.total_kv_heads", 0, "1 or more KV heads", "at least 1"),
    ("shape.layers", 0, "1 or more layers", "at least 1"),
    ("shape.heads", -1, "1 or more KV heads", "at least 1"),
    ("shape.head_dim", "64", "1 or more elements", "int"),
    ("shape.kv", 3, "2, 1", "MLA"),
    ("shape.dtype", "", "non-empty text", "bfloat16"),
    ("model.first_layer", -1, "0 or more layers", "at least 0"),
    ("device.pages", 0, "1 or more pages", "at least 1"),
    ("device.load_engine", "staged", "'auto', 'kernel', 'direct'", "use 'auto'"),
    ("device.write_back_engine", "stage", "'staged'", "did you mean 'staged'?"),
    ("host.ratio", 0, "more than 0", "positive"),
    ("host.ratio", math.nan, "more than 0", "float"),
    ("host.size_gb", -1, "more than 0", "positive"),
    ("host.pages", 0, "1 or more pages", "at least 1"),
    ("host.reserve_gb", -0.5, "0 or more", "0 or a positive"),
    ("host.layout", "page_frist", "'page_first_direct', 'page_first'", "did you mean 'page_first'?"),
    ("host.touch", "early", "'auto', 'ahead', 'as_needed'", "use 'auto'"),
    ("host.numa_node", -1, "integers >= 0, or None", "node"),
    ("host.header_bytes", 512, "4096, 0", "4096"),
    ("storage.url", "/var/cache", "scheme://", "file:///var/cache"),
    ("storage.url", "", "non-empty text", "memory://"),
    ("storage.prefetch_threshold_tokens", -1, "0 or more tokens", "at least 0"),
    ("storage.prefetch_policy", "wait", "'wait_complete'", "use 'best_effort'"),
    ("storage.prefetch_timeout_base_s", -1, "0 or more seconds", "0 or"),
    ("storage.prefetch_timeout_per_ki_token_s", math.inf, "0 or more seconds", "float"),
    ("storage.prefetch_timeout_max_s", 0, "more than 0 seconds", "positive"),
    ("storage.prefetch_timeout_max_s", 0.5, "prefetch_timeout_base_s or more", "raise"),
    ("storage.read_concurrency", 0, "1 or more batches", "at least 1"),
    ("storage.write_concurrency", 1.5, "1 or more batches", "int"),
    ("storage.read_in_flight_bytes", 0, "1 or more bytes", "at least 1"),
    ("storage.write_in_flight_bytes", "1 GB", "1 or more bytes", "int"),
    ("storage.query_timeout_s", 0, "more than 0 seconds", "positive"),
    ("storage.read_timeout_s", -1, "more than 0 seconds", "positive"),
    ("storage.write_timeout_s", math.nan, "more than 0 seconds", "float"),
    ("storage.max_hung_calls", 0, "1 or more calls", "at least 1"),
    ("storage.shed_latency_s", 0, "more than 0 seconds", "positive"),
    ("storage.breaker_failures", 0, "1 or more failures", "at least 1"),
    ("storage.breaker_delay_s", 0, "more than 0 seconds", "positive"),
    ("storage.breaker_max_delay_s", 0.5, "breaker_delay_s or more", "raise"),
    ("storage.store_on", "evict", "'publish', 'host_evict'", "did you mean 'host_evict'?"),
    ("storage.store_water_mark", 75, "a share of the host pool, from 0 to 1", "0.25"),
    ("storage.gather_s", 2, "0 to 1.0 seconds", "use the default"),
    ("storage.gather_s", -1, "0 or more seconds", "use 0 or a positive number"),
    ("storage.keys", "prefix", "'suffix', 'unified', 'raw'", "use 'suffix'"),
    ("storage.tp_lcm_size", 8, "keys = 'unified'", "storage.keys = 'unified'"),
    ("storage.tp_lcm_size", 0, "1 or more", "at least 1"),
    ("storage.head_group", 1, "keys = 'unified'", "leave head_group out"),
    ("storage.layer_partition", 15, "keys = 'unified'", "leave layer_partition out"),
    ("storage.verify", "never", "'always'", "use 'always'"),
    ("storage.verify_every", 0, "1 or more pages", "at least 1"),
    ("storage.scrub_mb_s", -1, "0 or more", "0 or a positive"),
    ("storage.probe_keys", -1, "0 or more names", "at least 0"),
    ("deadlines.load_s", 0, "more than 0 seconds", "positive"),
    ("deadlines.write_back_s", -1, "more than 0 seconds", "positive"),
    ("deadlines.backup_s", "30", "more than 0 seconds", "float"),
]


def _make(field: str, value: object) -> object:
    part, _, name = field.rpartition(".")
    values = SHAPE if part == "shape" else {}
    return PARTS[part](**{**values, name: value})


@pytest.mark.parametrize(("field", "value", "allowed", "fix"), REFUSALS)
def test_a_refusal_names_field_value_allowed_values_and_fix(field: str, value: object, allowed: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _make(field, value)
    error = caught.value
    assert error.field == field
    assert repr(error.value) == repr(value)
    assert allowed in error.allowed
    assert fix in error.fix
    for part in (field, repr(value), error.allowed, error.fix):
        assert part in str(error)


def test_every_setting_has_a_refusal() -> None:
    tested = {refusal[0] for refusal in REFUSALS}
    settings = {f"{prefix}.{name}".lstrip(".") for prefix, struct in PARTS.items() for name in struct.__struct_fields__}
    assert settings == tested


@pytest.mark.parametrize(
    ("values", "field", "allowed", "fix"),
    [
        ({"storage": STORED}, "model.model_id", "a non-empty text", "set model.model_id, or leave storage.url out"),
        (
            {"storage": STORED, "model": ModelFacts(model_id="toy")},
            "model.weights",
            "a non-empty text",
            "set model.weights, or leave storage.url out",
        ),
        (
            {"storage": STORED, "model": FACTS, "host": HostConfig(header_bytes=0)},
            "host.header_bytes",
            "4096 with storage",
            "leave header_bytes at 4096, or set storage.keys = 'raw'",
        ),
        (
            {"storage": StorageConfig(url="memory://a", keys="raw", verify="off"), "model": FACTS},
            "host.header_bytes",
            "0 with raw keys",
            "set host.header_bytes = 0",
        ),
        (
            {"storage": StorageConfig(keys="unified")},
            "host.layout",
            "'page_unified' with unified keys, and with no others",
            "set host.layout = 'page_unified'",
        ),
        (
            {"host": HostConfig(layout="page_unified")},
            "host.layout",
            "'page_unified' with unified keys, and with no others",
            "set storage.keys = 'unified'",
        ),
    ],
)
def test_storage_needs_facts_and_headers(values: dict[str, Any], field: str, allowed: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert (caught.value.field, caught.value.allowed, caught.value.fix) == (field, allowed, fix)


@pytest.mark.parametrize(
    ("data", "field", "fix"),
    [
        ({"pagesize": 64}, "pagesize", "did you mean 'page_size'?"),
        ({"host": {"ration": 2}}, "host.ration", "did you mean 'host.ratio'?"),
        ({"storage": {"zzz": 1}}, "storage.zzz", "remove storage.zzz"),
        ({"host": 3}, "host", "use a table"),
        ({"shape": {"layers": 2}}, "shape.heads", "set shape.heads"),
    ],
)
def test_unknown_and_missing_keys_are_refused(data: dict[str, object], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(data)
    assert caught.value.field == field
    assert caught.value.fix == fix
    assert caught.value.allowed


def test_a_mapping_makes_what_was_asked_for() -> None:
    config = Config.from_dict(
        {
            "page_size": 16,
            "shape": {"layers": 2, "heads": 3, "head_dim": 8, "dtype": "bfloat16"},
            "model": {"model_id": "toy", "weights": "v1"},
            "storage": {"url": "memory://a", "prefetch_policy": "best_effort"},
        }
    )
    assert config == Config(
        page_size=16,
        shape=ShapeConfig(layers=2, heads=3, head_dim=8, dtype="bfloat16"),
        model=FACTS,
        storage=StorageConfig(url="memory://a", prefetch_policy="best_effort"),
    )
    assert Config.from_dict(config.to_dict()) == config


def test_files(tmp_path: Path) -> None:
    toml = tmp_path / "cache.toml"
    toml.write_text(
        'page_size = 32\n[host]\nratio = 1\n[model]\nmodel_id = "m"\nweights = "1"\n[storage]\nurl = "file:///tmp/kv"\n'
    )
    config = Config.load(toml)
    assert (config.page_size, config.host.ratio, config.storage.url) == (32, 1, "file:///tmp/kv")
    as_json = tmp_path / "cache.json"
    as_json.write_text(json.dumps(config.to_dict()))
    assert Config.load(as_json) == config


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("cache.yaml", "", "unknown kind of file"),
        ("cache.toml", "page_size = ", "cannot be read"),
        ("cache.json", "{", "cannot be read"),
        ("absent.toml", None, "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str | None, problem: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        Config.load(file)
    assert caught.value.value == str(file)
    assert caught.value.fix


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    file.write_text("[]")
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert caught.value.field == "configuration"


def test_the_prefetch_timeout_grows_with_the_tokens_up_to_its_maximum() -> None:
    storage = StorageConfig()
    assert storage.prefetch_timeout_s(0) == 1.0
    assert storage.prefetch_timeout_s(1024) == 1.25
    assert storage.prefetch_timeout_s(4096) == 2.0
    assert storage.prefetch_timeout_s(1_000_000) == 30.0
    assert StorageConfig(prefetch_policy="wait_complete").prefetch_timeout_s(1024) is None
    assert StorageConfig(prefetch_policy="best_effort").prefetch_timeout_s(1024) is None


def test_a_configuration_cannot_be_changed_and_a_changed_copy_is_checked() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.page_size = 1  # type: ignore[misc]
    assert msgspec.structs.replace(config, page_size=1).page_size == 1
    with pytest.raises(ConfigError):
        msgspec.structs.replace(config, page_size=0)


def test_core_offers_the_same_policies() -> None:
    assert set(WRITE_POLICIES) == set(core_config.WRITE_POLICIES) - {"none"}
    assert EVICTIONS == order.EVICTIONS
    settings = {field.name: field.default for field in msgspec.structs.fields(PolicyConfig)}
    core = {field.name: field.default for field in msgspec.structs.fields(core_config.CoreConfig)}
    assert settings == {name: core[name] for name in settings}
