"""Documentation that can be wrong is compared with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import hicache_actors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def _load(file: Path) -> ModuleType:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIGURATION = _load(ROOT / "docs" / "configuration_table.py")


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == CONFIGURATION.rewrite(page), "run: python docs/configuration_table.py"


FORMAT = _load(ROOT / "docs" / "storage_format_table.py")


def test_the_page_on_the_storage_format_is_up_to_date() -> None:
    page = (ROOT / "docs" / "storage-format.md").read_text()
    assert page == FORMAT.rewrite(page), "run: python docs/storage_format_table.py"


def test_the_table_of_defaults_in_the_readme_is_right() -> None:
    section = README.split("## Defaults")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", section, flags=re.MULTILINE))
    known = {s.name: s.default for part in CONFIGURATION.settings().values() for s in part if s.default != "required"}
    assert rows == known


def test_every_setting_says_what_it_decides() -> None:
    for part in CONFIGURATION.settings().values():
        for setting in part:
            assert setting.text
            assert setting.default == "required" or "Default: " in setting.text, setting.name


def test_the_map_of_folders_is_complete() -> None:
    section = README.split("## Where things are")[1].split("\n## ")[0]
    mapped = set(re.findall(r"^\| `([\w/]+)/` \|", section, flags=re.MULTILINE))
    for folder in mapped:
        assert (ROOT / folder).is_dir(), folder
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {p.replace(".", "/").replace("hicache_actors/backends", "backends") for p in packages}
    assert {f.replace("hicache_actors/cuda_ext", "cuda_ext") for f in folders} <= mapped


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        titles = re.findall(r"^#+ (.+)$", (page.parent / file if file else page).read_text(), flags=re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    for name in re.findall(
        r"`(?:hicache_actors\.)?((?:testing|backends|core|cuda_ext|keys|runtime)\.[\w.]+)`", page.read_text()
    ):
        value: object = hicache_actors
        place = "hicache_actors"
        for part in name.split("."):
            place = f"{place}.{part}"
            value = getattr(value, part) if hasattr(value, part) else import_module(place)
        assert value is not None, name


def test_the_backend_that_is_documented_passes_the_contract(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "writing-a-backend.md").read_text()
    backend, suite = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "test_documented.py").write_text(backend + "\n\n" + suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\nfilterwarnings = error\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_guide_to_tiers_quotes_its_example() -> None:
    def unindented(code: str) -> str:
        return re.sub(r"\n\s*", "\n", code.strip())

    example = unindented((ROOT / "examples" / "custom_tier.py").read_text())
    quotes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "custom-tier.md").read_text(), flags=re.DOTALL)
    assert len(quotes) >= 5
    assert [quote for quote in quotes for part in quote.split("\n\n") if unindented(part) not in example] == []


def test_make_help_names_the_commands_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:.*## \S", makefile, flags=re.MULTILINE), target
