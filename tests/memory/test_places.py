"""Where a store lies on this host, as its URL says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors.backends.slab.options import SlabOptions
from hicache_actors.backends.slab.store_file import NAME
from hicache_actors.memory.places import SLAB_FILE, Place, place_of, places_of


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///a%20b/c?max_gb=5", Place(Path("/a b/c"), 5 * 10**9)),
        ("file:///c?max_gb=five", Place(Path("/c"), None)),
        ("sglang-file:///c", Place(Path("/c"), None)),
        ("nixl:///c?max_gb=0.5", Place(Path("/c"), 5 * 10**8)),
        ("nixl://BUCKET/prefix", None),
        ("slab:///none?gb=2", Place(Path("/none"), 2 * 10**9, 0)),
        ("mmap:///none", Place(Path("/none"), None, 0)),
        ("shm://none?gb=1", Place(Path("/dev/shm/hicache-none"), 10**9, 0)),
        ("memory://x", None),
        ("redis://host/0", None),
        ("file://", None),
        ("slab://", None),
        ("http://[", None),
    ],
)
def test_each_kind_of_url(url: str, place: Place | None) -> None:
    assert place_of(url) == place


def test_layers_have_a_place_each() -> None:
    places = places_of("layers://?write=all slab:///near?gb=1 s3://bucket/kv file:///far")
    assert [place.folder for place in places] == [Path("/near"), Path("/far")]


def test_slabs_lie_where_they_are_made(tmp_path: Path) -> None:
    assert SLAB_FILE == NAME
    (tmp_path / NAME).write_bytes(bytes(8192))
    assert place_of(f"slab://{tmp_path}?gb=1") == Place(tmp_path, 8192, 8192)
    for url in ("shm://name-1?gb=1", f"slab://{tmp_path}?gb=1"):
        place = place_of(url)
        assert place is not None
        assert str(place.folder) == SlabOptions.parse(url).folder
