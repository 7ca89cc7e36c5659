"""What keeps equal tokens apart at every tier."""

from __future__ import annotations

import msgspec


class Scope(msgspec.Struct, frozen=True):
    """LoRA adapter and tenant salt of a prompt; prompts of different scopes never share a page on any tier.

    ``lora`` is SGLang's ``extra_key``, ``salt`` its ``cache_salt``: page hashes agree with SGLang's for equal values.
    """

    lora: str | None = None
    salt: str | None = None


NO_SCOPE = Scope()
