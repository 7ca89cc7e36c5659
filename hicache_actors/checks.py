"""Checks of single settings; each raises `ConfigError` with field, value, what is allowed and the fix."""

from __future__ import annotations

import difflib
import math

from hicache_actors.errors import ConfigError


def whole(field: str, value: object, unit: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            field, value, "not a whole number", allowed=f"{least} or more {unit}".rstrip(), fix="write an int"
        )
    if value < least:
        raise ConfigError(
            field, value, "too small", allowed=f"{least} or more {unit}".rstrip(), fix=f"use at least {least}"
        )


def count(field: str, value: object, unit: str) -> None:
    whole(field, value, unit, least=1)


def optional_count(field: str, value: object, unit: str) -> None:
    if value is not None:
        count(field, value, unit)


def number(field: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(field, value, "not a finite number", allowed=allowed, fix="write an int or a float")
    return value


def positive(field: str, value: object, unit: str) -> None:
    allowed = f"more than 0 {unit}".rstrip()
    if number(field, value, allowed) <= 0:
        raise ConfigError(field, value, "not positive", allowed=allowed, fix="use a positive number")


def not_negative(field: str, value: object, unit: str) -> None:
    if number(field, value, f"0 or more {unit}") < 0:
        raise ConfigError(field, value, "negative", allowed=f"0 or more {unit}", fix="use 0 or a positive number")


def share(field: str, value: object, whole: str) -> None:
    allowed = f"a share of {whole}, from 0 to 1"
    if not 0 <= number(field, value, allowed) <= 1:
        raise ConfigError(field, value, "not a share", allowed=allowed, fix="write a quarter as 0.25")


def flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(field, value, "neither true nor false", allowed=("True", "False"), fix="write a bool")


def text(field: str, value: object, *, fix: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(field, value, "not a non-empty text", allowed="a non-empty text", fix=fix)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = "holds half a character (a lone surrogate)"
            raise ConfigError(field, value, problem, allowed="text that can be encoded", fix=fix) from None


def optional_text(field: str, value: object, *, fix: str) -> None:
    if value is not None:
        text(field, value, fix=fix)


def choice(field: str, value: object, allowed: tuple[str | int, ...], fix: str = "") -> None:
    if isinstance(value, bool) or value not in allowed:
        close = difflib.get_close_matches(value, map(str, allowed), n=1) if isinstance(value, str) else []
        fix = f"did you mean {close[0]!r}?" if close else fix or f"use {allowed[0]!r}"
        raise ConfigError(field, value, "not available", allowed=", ".join(map(repr, allowed)), fix=fix)
