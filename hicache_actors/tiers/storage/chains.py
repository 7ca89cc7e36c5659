"""What stands before a page in its prompt, for backends that want to know (`hicache_actors.backends.backend.keys_before`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Chains:
    """The paths that the pages of a job lie on, each as the hashes of all its pages from the first one of the prompt on.

    Keys are made when somebody asks, and kept for the job.  Any thread.
    """

    def __init__(self, keys_of: Callable[[Sequence[bytes]], list[str]], paths: Sequence[Sequence[bytes]]) -> None:
        self._keys_of, self._paths = keys_of, paths
        self._places: dict[str, tuple[list[str], int]] | None = None

    def before(self, key: str) -> list[str]:
        """All objects of the pages before, and those of the same page that its scheme names first; empty for a key of no path."""
        if self._places is None:
            chains = [self._keys_of(path) for path in self._paths]
            # Paths that have left one another share what is before, so it does not matter which one a key is found on.
            self._places = {key: (chain, at) for chain in chains for at, key in enumerate(chain)}
        chain, at = self._places.get(key, ([], 0))
        return chain[:at]
