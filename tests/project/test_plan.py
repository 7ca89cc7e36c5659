"""``hicache plan``: golden numbers of models that everybody knows, and what a command line may say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.command import cli
from hicache_actors.command.modelfile import dtype_name, model_shape, read_model
from hicache_actors.command.plan import binary, context_name, context_tokens
from hicache_actors.errors import ConfigError

BIG = ["plan", "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--dtype", "fp16"]

LLAMA3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
             "torch_dtype": "bfloat16", "max_position_embeddings": 131072}  # fmt: skip
QWEN3_600M = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024,
              "head_dim": 128, "dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 4096}  # fmt: skip
GEMMA3 = {"torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27},
          "text_config": {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                          "sliding_window": 1024,
                          "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}}  # fmt: skip
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
               "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}  # fmt: skip
QWEN3_NEXT = {"num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 256, "dtype": "bfloat16",
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}  # fmt: skip
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "torch_dtype": "float32"}


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(list(arguments)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def run_json(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer = json.loads(run(*arguments, "--json", capsys=capsys))
    assert isinstance(answer, dict)
    return answer


def test_the_known_example(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(*BIG, capsys=capsys)
    assert "320 KiB a token" in out
    assert "10 GiB at 32K" in out
    assert "2.5 GiB at 8K" in out
    answer = run_json(*BIG, capsys=capsys)
    assert answer["token_bytes"] == 320 * 1024
    assert {c["tokens"]: c["bytes"] for c in answer["contexts"]} == {8192: 5 * 2**29, 32768: 10 * 2**30}


def test_as_a_command_and_without_torch() -> None:
    code = f"import sys; from hicache_actors.command import cli; cli.main({BIG!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KV takes 320 KiB a token, 2.5 GiB at 8K, 10 GiB at 32K\n" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("data", "token_bytes", "remarks"),
    [
        (LLAMA3_8B, 131_072, 0),
        (QWEN3_600M, 114_688, 0),
        (GEMMA3, 48 * 2 * 8 * 256 * 2, 1),
        (DEEPSEEK_V3, 70_272, 0),
        (QWEN3_NEXT, 12 * 2 * 2 * 256 * 2, 1),
        (GPT2, 73_728, 0),
        ({**LLAMA3_8B, "torch_dtype": None}, 131_072, 1),
        ({**LLAMA3_8B, "sliding_window": 4096}, 131_072, 1),
        ({**LLAMA3_8B, "num_kv_shared_layers": 8}, 24 * 4096, 1),
        ({**GPT2, "multi_query": True}, 73_728 // 12, 0),
    ],
)
def test_bytes_of_a_token(data: dict[str, Any], token_bytes: int, remarks: int) -> None:
    model = model_shape(data)
    assert model.token_bytes == token_bytes
    assert len(model.remarks) == remarks


def test_the_kv_may_have_a_type_of_its_own() -> None:
    assert model_shape(LLAMA3_8B, dtype="fp8").token_bytes == 65_536


@pytest.mark.parametrize(("name", "expected"), [("FP16", "float16"), ("torch.bfloat16", "bfloat16"), ("int8", "int8")])
def test_names_of_types(name: str, expected: str) -> None:
    assert dtype_name(name) == expected


def test_transformers_agrees() -> None:
    """The same numbers as the integration computes from the framework's own configuration."""
    from transformers import LlamaConfig

    from hicache_actors.integrations.hf_config import kv_shape_of

    config = LlamaConfig(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=256, dtype="bfloat16"
    )
    assert model_shape(json.loads(config.to_json_string())).rank_shape(64) == kv_shape_of(config)


@pytest.mark.parametrize(
    ("data", "tp", "heads", "copies"),
    [(LLAMA3_8B, 1, 8, 1), (LLAMA3_8B, 4, 2, 1), (LLAMA3_8B, 16, 1, 2), (DEEPSEEK_V3, 8, 1, 8)],
)
def test_ranks_split_heads_or_repeat_them(data: dict[str, Any], tp: int, heads: int, copies: int) -> None:
    model = model_shape(data)
    assert model.rank_shape(64, tp).heads == heads
    assert model.copies(tp) == copies


@pytest.mark.parametrize("tp", [3, 12])
def test_an_uneven_split_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match="divisors and multiples of 8"):
        model_shape(LLAMA3_8B).rank_shape(64, tp)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "model.num_hidden_layers"),
        ({**LLAMA3_8B, "num_hidden_layers": "many"}, "model.num_hidden_layers"),
        ({**LLAMA3_8B, "hidden_size": 100}, "model.head_dim"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "model.qk_rope_head_dim"),
        ({**LLAMA3_8B, "dtype": "int3"}, "dtype"),
        ({**LLAMA3_8B, "layer_types": ["mamba"] * 32}, "model.num_hidden_layers"),
        ({**LLAMA3_8B, "layer_types": ["mamba"] * 3}, "model.layer_types"),
        ({**LLAMA3_8B, "layer_types": [{"mamba": 1}] * 32}, "model.layer_types"),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_shape(data)
    assert caught.value.field == field


def test_an_interval_tells_which_layers_keep_k_and_v() -> None:
    listed = model_shape(QWEN3_NEXT)
    told = {name: value for name, value in QWEN3_NEXT.items() if name != "layer_types"}
    assert model_shape({**told, "full_attention_interval": 4}) == listed
    assert listed.layers == 12


def test_a_model_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B))
    out = run("plan", "--model", str(folder), "--tp", "2", capsys=capsys)
    assert out.startswith("llama: 32 layers, 8 KV heads x 128, bfloat16\n")
    assert "128 KiB a token, 1 GiB at 8K, 4 GiB at 32K, 16 GiB at 128K" in out
    assert "each of 2 ranks takes 64 KiB a token" in out
    assert read_model(folder / "config.json").name == "llama"


@pytest.mark.parametrize("text", [None, "not json", "[1]"])
def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_model(file)
    assert caught.value.field == "model"


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device-gb", "40", "--host-gb", "200", "--disk-gb", "4000", "--tp", "4", "--context", "32K"]
    answer = run_json(*BIG, *arguments, capsys=capsys)
    page_bytes, slot_bytes = 64 * 81_920, 64 * 81_920 + 4096
    pages = {tier: size["pages"] for tier, size in answer["tiers"].items()}
    assert pages == {
        "device": 40 * 10**9 // page_bytes,
        "host": 200 * 10**9 // slot_bytes,
        "storage": 10**12 // slot_bytes,
    }
    assert answer["sessions"] == {tier: {"32768": n // 512} for tier, n in pages.items()}
    assert answer["traps"] == []
    assert answer["tp"] == 4


def test_sessions_take_whole_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Field report B107: sums of lengths in tokens are less than what whole pages take."""
    shape = ["--layers", "1", "--kv-heads", "1", "--head-dim", "64", "--dtype", "int8", "--page-size", "64"]
    device_gb = str(16 * 64 * 128 / 1e9)  # 16 pages, 1,024 tokens
    answer = run_json("plan", *shape, "--device-gb", device_gb, "--context", "65", "--context", "64", capsys=capsys)
    assert answer["tiers"]["device"]["tokens"] == 1024
    assert answer["sessions"]["device"] == {"64": 16, "65": 8}


def test_a_latent_is_stored_once_and_held_by_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--layers", "61", "--mla", "--head-dim", "576", "--disk-gb", "100"]
    alone, ranks = (run_json(*arguments, "--tp", tp, capsys=capsys) for tp in ("1", "8"))
    assert alone["token_bytes"] == ranks["token_bytes"] == 70_272
    assert alone["tiers"]["storage"] == ranks["tiers"]["storage"]


def test_traps_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device-gb", "20", "--host-ratio", "1", "--disk-gb", "1000", "--page-size", "8", "--context", "128K"]
    answer = run_json(*BIG, *arguments, capsys=capsys)
    assert [trap["code"] for trap in answer["traps"]] == ["page_tiny", "host_not_larger", "context_over_device"]
    out = run(*BIG, *arguments, capsys=capsys)
    assert "storage hits have nowhere to land" in out
    assert "a request of 128K tokens does not fit" in out


def test_speeds_make_break_even_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = ["--prefill-tokens-per-s", "8000", "--disk-read-gb-s", "1", "--disk-gb", "1000"]
    answer = run_json(*BIG, *speeds, capsys=capsys)
    assert answer["break_even"]["load_bytes_s"] == 8000 * 327_680
    assert "storage_slower_than_recompute" in {trap["code"] for trap in answer["traps"]}


def test_a_host_that_is_too_small_is_refused_with_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BIG, "--host-gb", "100", "--memory-gb", "500", "--tp", "8"]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "divided among 8 ranks" in err
    assert "allowed: up to " in err
    assert cli.main([*arguments, "--ranks-per-host", "2"]) == 0
    assert "(2 ranks on this host)" in capsys.readouterr().out


def test_staging_slots_are_planned_and_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Under layer_first a batch that is read or written takes staging slots: at 20 MiB a page one each."""
    arguments = [*BIG, "--layout", "layer_first", "--host-gb", "20", "--device-gb", "10", "--disk-gb", "1000"]
    page_bytes = 64 * 327_680
    answer = run_json(*arguments, capsys=capsys)
    assert answer["staging"]["bytes"] == (4 + 2) * (page_bytes + 4096)
    assert answer["tiers"]["host"]["pages"] == 20 * 10**9 // page_bytes
    assert answer["tiers"]["storage"]["pages"] == 10**12 // (page_bytes + 4096)
    assert "staging   4 slots to read through and 2 to write through" in run(*arguments, capsys=capsys)
    assert cli.main([*arguments, "--memory-gb", "25.1"]) == 2
    assert "hicache: host.layout = 'layer_first': staging needs" in capsys.readouterr().err
    assert run_json(*arguments, "--memory-gb", "26", capsys=capsys)["staging"] == answer["staging"]
    assert run_json(*BIG, "--host-gb", "20", capsys=capsys)["staging"] is None


def test_a_configuration_is_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(
        'page_size = 32\n[shape]\nlayers = 4\nheads = 2\nhead_dim = 64\ndtype = "float32"\n[device]\npages = 100\n'
        '[model]\nmodel_id = "tiny"\nweights = "1"\n[storage]\nurl = "file:///somewhere"\n'
    )
    answer = run_json("plan", "--config", str(file), capsys=capsys)
    assert answer["page_tokens"] == 32
    assert answer["model"]["name"] == "tiny"
    assert {tier: size["pages"] for tier, size in answer["tiers"].items()} == {"device": 100, "host": 200}
    assert answer["storage"]["where"] == "file:///somewhere"
    other = run_json("plan", "--config", str(file), "--page-size", "16", "--host-ratio", "3", capsys=capsys)
    assert (other["page_tokens"], other["tiers"]["host"]["pages"]) == (16, 300)
    split = run_json("plan", "--config", str(file), "--tp", "2", capsys=capsys)
    assert (split["model"]["kv_heads"], split["token_bytes"]) == (4, answer["token_bytes"])  # a rank's shape stays


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["plan", "--layers", "8"], "kv_heads"),
        (["plan"], "layers"),
        (["plan", "--model", "/nowhere/config.json"], "model"),
        ([*BIG, "--model", "x"], "model"),
        ([*BIG, "--tp", "0"], "tp"),
        ([*BIG, "--tp", "5"], "tp"),
        ([*BIG, "--device-gb", "-1"], "device_gb"),
        ([*BIG, "--device-gb", "0.0001"], "device_gb"),
        ([*BIG, "--page-size", "0"], "page_size"),
        ([*BIG, "--dtype", "fp12"], "dtype"),
        ([*BIG, "--host-gb", "0.0001"], "host.size_gb"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"hicache: {field} = ")


@pytest.mark.parametrize("text", ["0", "-1", "K", "many", "1.5K"])
def test_a_context_that_is_none_is_wrong_use(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*BIG, f"--context={text}"])
    assert left.value.code == 2
    assert "--context" in capsys.readouterr().err


def test_words_for_numbers() -> None:
    assert [binary(n) for n in (0, 1023, 1024, 70_272, 5 * 2**29, 3 * 2**50)] == [
        "0 bytes", "1,023 bytes", "1 KiB", "68.62 KiB", "2.5 GiB", "3,072 TiB"
    ]  # fmt: skip
    assert [context_name(n) for n in (8192, 40_960, 2**20, 1000)] == ["8K", "40K", "1M", "1,000"]
    assert [context_tokens(text) for text in ("8192", "32K", "1m")] == [8192, 32_768, 2**20]


def test_what_is_no_context_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-1K", "K", "many", "1.5K"):
        with pytest.raises(SystemExit):
            cli.main(["plan", "--context", wrong] if wrong[0] != "-" else ["plan", f"--context={wrong}"])
        assert f"{wrong!r} is no count of tokens; write e.g. 8192, 32K or 1M" in capsys.readouterr().err


def test_the_size_of_a_store_is_what_its_url_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cache.toml"
    file.write_text('[model]\nmodel_id = "m"\nweights = "1"\n[storage]\nurl = "slab:///none?gb=100"\n')
    answer = run_json(*BIG, "--config", str(file), capsys=capsys)
    assert answer["tiers"]["storage"]["pages"] == 100 * 10**9 // answer["slot_bytes"]
    answer = run_json(*BIG, "--config", str(file), "--disk-gb", "50", capsys=capsys)
    assert answer["tiers"]["storage"]["pages"] == 50 * 10**9 // answer["slot_bytes"]
    assert "storage_over_disk" in {trap["code"] for trap in answer["traps"]}


def test_a_latent_has_no_heads(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["plan", "--layers", "61", "--mla", "--head-dim", "576"]
    assert cli.main([*shape, "--kv-heads", "4"]) == 2
    assert "kv_heads = 4: a latent has no heads" in capsys.readouterr().err
    assert cli.main([*shape, "--kv-heads", "1"]) == 0
