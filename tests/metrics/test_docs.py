"""The page on metrics is compared with the code."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_the_metrics_page_are_up_to_date() -> None:
    spec = spec_from_file_location("metrics_table", DOCS / "metrics_table.py")
    assert spec is not None
    assert spec.loader is not None
    tables = module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = (DOCS / "metrics.md").read_text()
    assert page == tables.rewrite(page), "run: python docs/metrics_table.py"
