"""What a ``redis://`` or ``valkey://`` URL may say."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import ConfigError
from hicache_actors.masking import masked

SCHEMES: Final = ("redis", "valkey", "redis+unix", "valkey+unix")
_PORT: Final = 6379
_NAMES: Final = ("db", "connections", "timeout_s", "prefix", "expire_s")


class RedisOptions(NamedTuple):
    """``redis://[USER:PASSWORD@]HOST[:PORT][/DB]`` or ``redis+unix:///path/of/socket[?db=DB]``, or ``valkey`` for ``redis``.

    Options: ``connections`` (4), ``timeout_s`` without any progress (5), ``prefix`` of the keys (``hicache:``) and ``expire_s``,
    after which an object leaves (never).
    """

    host: str  #: empty: ``path`` is a socket of this host
    port: int
    path: str
    user: str
    password: str
    db: int
    connections: int
    timeout_s: float
    prefix: str
    expire_s: int

    @classmethod
    def parse(cls, url: str) -> RedisOptions:
        """`ConfigError` for what cannot be honoured; passwords are not in its message."""
        parts = urlsplit(url)
        local = parts.scheme.endswith("+unix")
        shown = masked(url)
        given = parse_url(shown, parts.scheme, host=not local, options=_NAMES).options
        try:
            port = parts.port or _PORT
        except ValueError as error:
            raise ConfigError(FIELD, shown, f"no such port: {error}", allowed="1 to 65535") from error
        path = unquote(parts.path)
        db = given.get("db", "0")
        if local:
            if path.strip("/") == "":
                raise ConfigError(FIELD, shown, "names no socket", allowed="redis+unix:///path/of/socket")
        else:
            if not parts.hostname:
                raise ConfigError(FIELD, shown, "names no host", allowed="redis://HOST:PORT/DB")
            db, path = path.strip("/") or db, ""
        prefix = given.get("prefix", "hicache:")
        if not prefix.isascii() or any(c in "{}*?[]\\ \r\n" for c in prefix):
            raise ConfigError(
                FIELD, shown, f"prefix={prefix!r} has a character with a meaning of its own in key patterns or clusters",
                allowed="ASCII without {}*?[]\\ and spaces",
            )  # fmt: skip
        return cls(
            "" if local else str(parts.hostname),
            port,
            path,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            int(number(shown, "db", db, whole=True)),
            int(number(shown, "connections", given.get("connections", "4"), whole=True, least=1)),
            number(shown, "timeout_s", given.get("timeout_s", "5"), least=0.001),
            prefix,
            int(number(shown, "expire_s", given.get("expire_s", "0"), whole=True)),
        )
