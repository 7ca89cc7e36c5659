"""Every example runs, with small sizes, as a user would run it; so does the quickstart of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# example -> (arguments, a text that its output must hold)
EXAMPLES: dict[str, tuple[list[str], str]] = {
    "custom_tier.py": (["--prompts", "4"], "mirrored 54 of 54 pages"),
    "http_server.py": (["--demo"], "OK: prefixes were reused, and who left cost nothing more"),
    "quickstart.py": (["--prompt-tokens", "200"], "reused tokens with wrong bytes: 0"),
    "restart_warm.py": (["--prompts", "3"], "every byte as it was"),
    "serve_chat.py": (
        ["--sessions", "3", "--turns", "2", "--doc-tokens", "100", "--device-pages", "40", "--threads", "1"],
        "0 passes with other logits",
    ),
    "two_instances.py": (["--model", "toy", "--doc-tokens", "300"], "OK: both instances read what the other wrote"),
    "two_ranks.py": (["--prompts", "4"], "hits equal on all 2 ranks: yes"),
    "tp_chat.py": (["--model", "random"], "texts as without eviction, and as of one process"),
    "step_engine.py": (["--requests", "12"], "reused tokens with wrong bytes: 0"),
}

# chat.py runs with a toy model in tests/integrations, with more to look at; smollm2.py converts its weights in `make demo`.
ELSEWHERE = {"chat.py", "smollm2.py"}


def _run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, tmp_path: Path) -> None:
    arguments, expected = EXAMPLES[example]
    assert expected in _run([str(ROOT / "examples" / example), *arguments], tmp_path)


def test_no_example_is_forgotten() -> None:
    programs = {file.name for file in (ROOT / "examples").glob("*.py") if "__main__" in file.read_text()}
    assert programs == set(EXAMPLES) | ELSEWHERE


def test_the_quickstart_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme.split("## Quickstart")[1].split("\n## ")[0], flags=re.DOTALL)
    program = tmp_path / "pasted.py"
    program.write_text(code)
    lines = _run([str(program)], tmp_path).splitlines()
    storage_tokens = [int(found) for line in lines for found in re.findall(r"storage=(\d+)", line)]
    assert [line.split()[0] for line in lines] == ["first", "first", "second", "second"]
    assert storage_tokens[0] == 0
    assert storage_tokens[2] == 592  # 37 whole pages of 16; the last token of a prompt is always computed
