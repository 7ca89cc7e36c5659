"""Passwords and keys in storage URLs reach the store, and nothing that is shown."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

import pytest

from hicache_actors import BackendError, ConfigError, StorageConfig
from hicache_actors.backends import open_backend
from hicache_actors.command import cli
from hicache_actors.masking import masked, masked_with
from hicache_actors.runtime import Workers
from hicache_actors.testing.small import open_small, prompt

SECRET = "hunter22"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter22@host:6379/2", "redis://user:***@host:6379/2"),
        ("redis://:hunter22@host", "redis://:***@host"),
        ("redis://user:hunter22/with@signs@host/0", "redis://user:***@host/0"),
        (
            "s3://bucket/folder?endpoint=http://host&secret=hunter22",
            "s3://bucket/folder?endpoint=http://host&secret=***",
        ),
        ("s3://bucket?aws_secret_access_key=hunter22&requests=4", "s3://bucket?aws_secret_access_key=***&requests=4"),
        ("x://host?Token=hunter22#end", "x://host?Token=***#end"),
        ("cannot reach x://a:hunter22@b or y://c:hunter22@d", "cannot reach x://a:***@b or y://c:***@d"),
    ],
)
def test_secrets_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "url", ["memory://demo", "file:///a:b/c@d?gb=2", "redis://user@host", "mooncake://host:50051", "", "a b?c=d"]
)
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert masked(url) == url


def test_a_secret_is_masked_beside_its_url_too() -> None:
    assert (
        masked_with("'user:hunter22@host' is no address", "x://user:hunter22@host") == "'user:***@host' is no address"
    )


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter22@bucket",
        "s3://bucket?secret=hunter22",
        "redis://user:hunter22@host?no=such",
        "redis://user:hunter22@host/x",
        "lmcache://user:hunter22@host",
        "mooncake://user:hunter22@host?protocol=x",
        "file://user:hunter22@host/folder",
        "slab:///folder?password=hunter22",
        "nosuch://user:hunter22@host",
    ],
)
def test_refusals_do_not_show_secrets(url: str) -> None:
    workers = Workers("test", 1)
    with pytest.raises(ConfigError) as refused:
        open_backend(url, workers)
    workers.close()
    error = refused.value
    assert "***" in str(error)
    assert SECRET not in f"{error} {error.value} {error.problem} {error.fix} {error.args}"


def test_errors_of_stores_do_not_show_secrets() -> None:
    assert str(BackendError(f"redis://u:{SECRET}@host: cannot be reached")) == "redis://u:***@host: cannot be reached"


async def test_an_open_cache_does_not_show_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hicache_actors")
    async with open_small(url=f"memory://user:{SECRET}@demo") as small:
        await small.engine.answer(prompt(3))
        storage = small.cache.snapshot().storage
        assert storage is not None
        assert storage.url == "memory://user:***@demo"
        with pytest.raises(BackendError) as refused:
            await small.cache.attach_storage(f"redis://user:{SECRET}@127.0.0.1:9/0", deadline_s=5.0)
        await small.cache.attach_storage(f"memory://other:{SECRET}@demo")
        shown = [str(refused.value), small.cache.report.text, repr(small.cache.snapshot())]
    assert "storage_switched" in caplog.text
    assert "storage_not_opened" in caplog.text
    assert SECRET not in caplog.text + "".join(shown)


def test_a_configuration_does_not_show_secrets() -> None:
    config = StorageConfig(url=f"redis://user:{SECRET}@host")
    assert config.url == f"redis://user:{SECRET}@host"
    assert "url='redis://user:***@host'" in repr(config)
    assert SECRET not in repr(config)


@pytest.mark.parametrize("url", [f"memory://user:{SECRET}@demo", f"s3://bucket?secret={SECRET}"])
def test_the_commands_do_not_show_secrets(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "page_size": 16,
        "model": {"model_id": "m", "weights": "w"},
        "shape": {"layers": 2, "heads": 2, "head_dim": 8},
        "device": {"pages": 32},
        "host": {"pages": 64},
        "storage": {"url": url},
    }
    file = tmp_path / "cache.json"
    file.write_text(json.dumps(config))
    for command in (["doctor", "--config", str(file)], ["plan", "--config", str(file)]):
        with contextlib.suppress(SystemExit):
            cli.main(command)
        shown = "".join(capsys.readouterr())
        assert shown
        assert SECRET not in shown
