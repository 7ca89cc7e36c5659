"""The table of field reports names a test for each number, or says what it waits for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-reports.md"
ROWS = re.findall(r"^\| (B\d{3}) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
TESTS = {
    name
    for file in (ROOT / "tests").glob("*/test_*.py")
    if "field_reports" in str(file.relative_to(ROOT))
    for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), flags=re.MULTILINE)
}


@pytest.mark.parametrize(("number", "proof"), [(number, proof) for number, _, _, proof in ROWS])
def test_each_report_has_a_test_or_a_reason(number: str, proof: str) -> None:
    if proof.startswith("not yet: "):
        assert len(proof.removeprefix("not yet: ")) > 20, "the reason"
        assert not any(f"_{number.lower()}_" in name for name in TESTS), "there is a test by now"
        return
    named = set(re.findall(r"`(test_b\d{3}_\w+)`", proof))
    assert named == {name for name in TESTS if f"_{number.lower()}_" in name}
    assert named


def test_each_number_is_in_the_table_once() -> None:
    numbers = [number for number, *_ in ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 60
    tested = {match[1].upper() for name in TESTS if (match := re.match(r"test_(b\d{3})_", name))}
    assert tested <= set(numbers)


def test_other_files_that_the_table_names_exist() -> None:
    for name in re.findall(r"`(?:tests/backends/)?(test_file\w*\.py)`", PAGE.read_text()):
        assert (ROOT / "tests" / "backends" / name).is_file(), name
