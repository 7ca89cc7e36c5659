"""What keeps equal tokens apart at every tier."""

from __future__ import annotations

import msgspec


class Scope(msgspec.Struct, frozen=True):
    """LoRA adapter and tenant salt of a prompt; prompts of different scopes never share a page on any tier.

    ``lora`` is SGLang's ``extra_key``, ``salt`` its ``cache_salt``: page hashes agree with SGLang's for equal values.  An engine
    that numbers its adapters gives ``lora=str(number)``, or better a name that means the same adapter in every instance.

    Raises ``TypeError`` or ``ValueError`` for what is no text: often these are a request's, so it is found out here and not where
    they are hashed.
    """

    lora: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        _check("lora", self.lora)
        _check("salt", self.salt)


def _check(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"scope.{name} is {text!r} ({type(text).__name__}): a text or None")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"scope.{name} is {text!r}: it holds half a character (a lone surrogate)") from None


NO_SCOPE = Scope()
