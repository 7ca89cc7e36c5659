"""What is never shown: passwords and keys in URLs.

Errors mask their own texts; whoever logs, prints or reports a storage URL masks it first.
"""

from __future__ import annotations

import re
from typing import Final

_PASSWORD: Final = re.compile(r"(?<=://)([^/?#@:\s]*:)([^?#\s]+)(?=@)")
_OPTION: Final = re.compile(
    r"([?&][\w.-]*(?:secret|passw|pwd|token|credential|signature|key)[\w.-]*=)([^&#\s'\"]+)", re.IGNORECASE
)
_SHORTEST: Final = 3  #: a shorter secret is not looked for outside its URL: it would be found in every other word


def masked(text: str) -> str:
    """``text`` with ``***`` for each password (``scheme://user:password@host``) and each option of a URL that is named like a
    secret (``?secret=...``, ``&access_key=...``).
    """
    return _OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***", text))


def masked_with(text: str, url: str) -> str:
    """`masked`, and the secrets of ``url`` are not shown outside a URL either."""
    for pattern in (_PASSWORD, _OPTION):
        for found in pattern.finditer(url):
            if len(found[2]) >= _SHORTEST:
                text = text.replace(found[2], "***")
    return masked(text)
