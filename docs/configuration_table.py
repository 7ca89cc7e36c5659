"""Writes the tables of docs/configuration.md from hicache_actors/config.py: ``python docs/configuration_table.py``.

The text of each setting is the docstring below its field, so code and documentation cannot drift apart; a test compares.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import NamedTuple

import msgspec

from hicache_actors import config

BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
PARTS: dict[str, type[msgspec.Struct]] = {
    "": config.Config,
    "model": config.ModelFacts,
    "shape": config.ShapeConfig,
    "device": config.DeviceConfig,
    "host": config.HostConfig,
    "storage": config.StorageConfig,
    "policy": config.PolicyConfig,
    "deadlines": config.Deadlines,
}


class Setting(NamedTuple):
    name: str  #: dotted, as in an error message
    default: str  #: as Python would write it; "required" where there is none
    text: str


def settings() -> dict[str, list[Setting]]:
    """The settings of each part, in the order of their fields.  Parts themselves are not listed."""
    return {part: list(_settings(part, struct)) for part, struct in PARTS.items()}


def _settings(part: str, struct: type[msgspec.Struct]) -> list[Setting]:
    texts = _field_texts(struct)
    found = []
    for field in msgspec.structs.fields(struct):
        if not part and field.name in PARTS:
            continue
        default = "required" if field.required else repr(field.default)
        found.append(Setting(f"{part}.{field.name}".lstrip("."), default, texts[field.name]))
    return found


def _field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def tables() -> str:
    lines = []
    for part, found in settings().items():
        title = f"`{part}`: {PARTS[part].__name__}" if part else "The cache: Config"
        about = " ".join((inspect.getdoc(PARTS[part]) or "").split())
        lines += [f"### {title}", "", about, "", "| setting | default | what it decides |", "|---|---|---|"]
        lines += [f"| `{name}` | `{default}` | {text} |" for name, default, text in found]
        lines.append("")
    return "\n".join(lines)


def rewrite(page: str) -> str:
    """``page`` with the text between the two marks made anew."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    tables_text = tables().replace("``", "`")
    return f"{head}{BEGIN}\n\n{tables_text}\n{END}{tail}"


if __name__ == "__main__":
    target = Path(__file__).with_name("configuration.md")
    target.write_text(rewrite(target.read_text()))
