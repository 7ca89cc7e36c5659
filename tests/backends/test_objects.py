"""Stored objects: whatever happens to the bytes, nothing but the true content passes."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from hicache_actors.backends.objects import (
    FIELDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Verdict,
    clear,
    seal,
    seal_many,
    verify,
    verify_many,
)

pytestmark = pytest.mark.usefixtures("both_ways")

OURS, THEIRS = b"o" * 16, b"t" * 16
HASH, OTHER_HASH = b"h" * 32, b"i" * 32
PAYLOAD = bytes(range(256)) * 4


def sealed(payload: bytes = PAYLOAD, chunk: int = 0) -> memoryview:
    object = memoryview(bytearray(HEADER_BYTES + len(payload)))
    object[HEADER_BYTES:] = payload
    seal(object, OURS, HASH, chunk)
    return object


def judge(object: memoryview) -> Verdict:
    return verify(object, OURS, HASH)


@given(st.binary(max_size=3000), st.integers(0, 2**64 - 1))
def test_a_sealed_object_is_whole(payload: bytes, chunk: int) -> None:
    object = sealed(payload, chunk)
    assert verify(object, OURS, HASH, chunk) is Verdict.OK
    assert object[HEADER_BYTES:] == payload


def test_the_golden_header() -> None:
    """The format on disk: whoever changes it raises FORMAT_VERSION."""
    object = bytes(sealed(chunk=5))
    assert object[:8] == MAGIC
    assert int.from_bytes(object[8:10], "little") == FORMAT_VERSION == 1
    assert (object[16:32], object[32:64]) == (OURS, HASH)
    assert int.from_bytes(object[64:72], "little") == 5
    assert int.from_bytes(object[72:80], "little") == len(PAYLOAD)
    assert object[80:4080] == bytes(4000)
    assert object[4080:4096].hex() == "514127c7542255f430a57f304be4dfb8"


def test_the_fields_lie_one_behind_the_other_and_hold_what_they_say() -> None:
    """The table that docs/storage-format.md is made of, against a sealed object."""
    ends = [field.offset + field.n_bytes for field in FIELDS]
    assert [field.offset for field in FIELDS] == [0, *ends[:-1]]
    assert ends[-1] == HEADER_BYTES
    object = bytes(sealed(chunk=5))
    found = {
        field.name: object[field.offset : field.offset + field.n_bytes] for field in FIELDS if field.name != "reserved"
    }
    assert found.pop("checksum") == xxh3_128(object[: HEADER_BYTES - 16] + object[HEADER_BYTES:]).digest()
    assert found == {
        "magic": MAGIC,
        "version": FORMAT_VERSION.to_bytes(2, "little"),
        "namespace": OURS,
        "page hash": HASH,
        "chunk": (5).to_bytes(8, "little"),
        "payload length": len(PAYLOAD).to_bytes(8, "little"),
    }
    reserved = [field for field in FIELDS if field.name == "reserved"]
    assert all(not any(object[field.offset : field.offset + field.n_bytes]) for field in reserved)


@given(st.integers(0, 8 * (HEADER_BYTES + len(PAYLOAD)) - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    object = sealed()
    object[bit // 8] ^= 1 << bit % 8
    found = judge(object)
    in_version = 8 <= bit // 8 < 10
    assert found is (Verdict.FOREIGN if in_version else Verdict.CORRUPT)


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
def test_a_truncated_object_is_found(n_bytes: int) -> None:
    assert judge(sealed()[:n_bytes]) is Verdict.CORRUPT


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
def test_an_object_torn_to_zeros_is_found(first: int) -> None:
    """What a power failure leaves of a file whose length was written before its blocks."""
    object = sealed()
    object[first:] = bytes(len(object) - first)
    assert judge(object) is (Verdict.EMPTY if first == 0 else Verdict.CORRUPT)


@given(st.integers(1, HEADER_BYTES + len(PAYLOAD) - 1))
def test_an_object_torn_between_two_writers_is_found(first: int) -> None:
    one, other = sealed(), sealed(PAYLOAD[::-1])
    object = memoryview(bytearray(one))
    object[first:] = other[first:]
    assert (judge(object) is Verdict.OK) == (object in (one, other))


@given(st.binary(max_size=HEADER_BYTES + 300))
def test_no_bytes_make_it_raise(noise: bytes) -> None:
    assert judge(memoryview(noise)) in (Verdict.CORRUPT, Verdict.EMPTY)
    assert judge(memoryview(MAGIC + noise)) in (Verdict.CORRUPT, Verdict.FOREIGN)


def test_another_namespace_is_foreign_and_not_corrupt() -> None:
    assert verify(sealed(), THEIRS, HASH) is Verdict.FOREIGN


def test_a_damaged_foreign_object_is_corrupt() -> None:
    object = sealed()
    object[-1] ^= 1
    assert verify(object, THEIRS, HASH) is Verdict.CORRUPT


def test_a_misfiled_object_is_corrupt() -> None:
    assert verify(sealed(), OURS, OTHER_HASH) is Verdict.CORRUPT
    assert verify(sealed(chunk=1), OURS, HASH, 2) is Verdict.CORRUPT


def test_a_cleared_slot_is_empty_whatever_it_held() -> None:
    object = sealed()
    clear(object)
    assert judge(object) is Verdict.EMPTY
    assert object[HEADER_BYTES:] == PAYLOAD
    assert judge(memoryview(bytearray(HEADER_BYTES))) is Verdict.EMPTY


def test_seal_replaces_all_of_an_old_header() -> None:
    object = memoryview(bytearray(b"\xff" * (HEADER_BYTES + len(PAYLOAD))))
    object[HEADER_BYTES:] = PAYLOAD
    seal(object, OURS, HASH)
    assert object == sealed()


@pytest.mark.parametrize(("namespace", "page_hash"), [(b"short", HASH), (OURS, b"short"), (OURS * 2, HASH)])
def test_digests_of_another_length_are_refused(namespace: bytes, page_hash: bytes) -> None:
    with pytest.raises(ValueError, match="namespace digest has"):
        seal(sealed(), namespace, page_hash)


def test_batches_on_slots_of_one_mapping() -> None:
    slot_bytes = HEADER_BYTES + 4096
    hashes = [bytes([i]) * 32 for i in range(5)]
    with mmap.mmap(-1, 5 * slot_bytes) as memory, memoryview(memory) as view:
        slots = [view[i * slot_bytes : i * slot_bytes + HEADER_BYTES + 1000] for i in range(5)]
        for i, slot in enumerate(slots):
            slot[HEADER_BYTES:] = bytes([i]) * 1000
        seal_many(slots, OURS, hashes, (7,))
        slots[3][HEADER_BYTES + 1] ^= 1
        clear(slots[1])
        assert verify_many(slots, OURS, hashes, (7,)) == [
            Verdict.OK, Verdict.EMPTY, Verdict.OK, Verdict.CORRUPT, Verdict.OK,
        ]  # fmt: skip
        for slot in slots:
            slot.release()


def test_a_batch_needs_a_hash_for_each_object() -> None:
    with pytest.raises(ValueError, match="zip"):
        seal_many([sealed()], OURS, [])
    with pytest.raises(ValueError, match="zip"):
        verify_many([sealed()], OURS, [HASH, HASH])
