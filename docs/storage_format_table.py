"""Writes the tables of docs/storage-format.md from the constants of the code: ``python docs/storage_format_table.py``.

A test compares, so the page cannot say something else than the code does.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from hicache_actors.backends.objects import FIELDS, FORMAT_VERSION, HEADER_BYTES
from hicache_actors.keys import namespace
from hicache_actors.keys.hashes import HASH_BYTES
from hicache_actors.keys.scheme import MAX_KEY_CHARACTERS
from hicache_actors.keys.unified import VERSION_PREFIX


def header() -> str:
    """The fields of an object's header, and where the payload begins."""
    rows = [f"| {field.offset} | {field.n_bytes} | {field.name} | {field.text} |" for field in FIELDS]
    rows.append(f"| {HEADER_BYTES} | ... | payload | the bytes of the page, or of one chunk of it |")
    return "\n".join(["| offset | bytes | field | content |", "|---|---|---|---|", *rows])


def facts() -> str:
    """The facts of a namespace, in the order in which they are encoded."""
    body = ast.parse(inspect.getsource(namespace.Namespace)).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = inspect.getsource(namespace.Namespace).splitlines()
    texts = {
        node.target.id: lines[node.lineno - 1].partition("#: ")[2]
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    rows = []
    for number, fact in enumerate(namespace.Namespace.__struct_fields__, start=1):
        grid = "yes" if fact in namespace.GRID_FACTS else ""
        rows.append(f"| {number} | `{fact}` | {grid} | {texts[fact]} |")
    return "\n".join(["| | fact | of the grid | what it is |", "|---|---|---|---|", *rows])


def constants() -> str:
    values = {
        "format version": FORMAT_VERSION,
        "version of the namespace's encoding": namespace.SCHEMA_VERSION,
        "bytes of a page hash": HASH_BYTES,
        "bytes of a namespace digest": namespace.NAMESPACE_BYTES,
        "of these, of the family": namespace.FAMILY_BYTES,
        "prefix of unified digests": f"`{VERSION_PREFIX}`",
        "longest key, in characters": MAX_KEY_CHARACTERS,
    }
    return "\n".join(
        ["| constant | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
    )


TABLES = {"header": header, "facts": facts, "constants": constants}


def rewrite(page: str) -> str:
    """``page`` with each table made anew, between its two marks."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    target = Path(__file__).with_name("storage-format.md")
    target.write_text(rewrite(target.read_text()))
