"""Storage classes with the face of SGLang 0.5.23's, written for these tests: what the adapter calls, and nothing of SGLang."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any] | None = None


class PoolName(StrEnum):
    KV = "kv"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor
    keys: list[str]


@dataclass
class PoolTransferResult:
    kv_hit_pages: int


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        self.pool_v2 = host_pool

    def on_host_pools_registered(self) -> None:
        self.all_pools = True

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        raise NotImplementedError

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        raise NotImplementedError


class Tensors(HiCacheStorage):
    """v0: whole tensors, in a dictionary that outlives it."""

    stores: dict[str, dict[str, bytes]] = {}  # noqa: RUF012

    def __init__(self, config: HiCacheStorageConfig, others: dict[str, Any]) -> None:
        assert (config.tp_rank, config.tp_size) == (0, 1)
        self.objects = self.stores.setdefault((config.extra_config or {})["store"], {})

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        data = self.objects.get(key)
        if data is None or len(data) != target_location.numel():
            return None
        target_location.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return target_location

    def set(self, key: str, value: torch.Tensor) -> bool:
        self.objects[key] = value.numpy().tobytes()
        return True

    def exists(self, key: str) -> bool:
        return key in self.objects

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.objects), len(keys))

    def clear(self) -> None:
        self.objects.clear()


class Addresses(Tensors):
    """v1: addresses of host pages."""

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        found = []
        for key, address, length in zip(keys, *self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True):
            data = self.objects.get(key)
            found.append(data is not None and len(data) == length)
            if data is not None and len(data) == length:
                ctypes.memmove(address, data, length)
        return found

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, address, length in zip(keys, *self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True):
            self.objects[key] = ctypes.string_at(address, length)
        return [True] * len(keys)


class Pools(Tensors):
    """v2: flat pages of a named pool."""

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        return PoolTransferResult(self.batch_exists(keys))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        [transfer] = transfers
        found = []
        for key, index in zip(transfer.keys, transfer.host_indices.tolist(), strict=True):
            data = self.objects.get(key)
            fits = data is not None and len(data) == self.pool_v2.get_data_page(index).numel()
            if data is not None and fits:
                self.pool_v2.set_from_flat_data_page(index, torch.frombuffer(bytearray(data), dtype=torch.uint8))
            found.append(fits)
        return {transfer.name: found}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        [transfer] = transfers
        for key, index in zip(transfer.keys, transfer.host_indices.tolist(), strict=True):
            self.objects[key] = self.pool_v2.get_data_page(index).numpy().tobytes()
        return {transfer.name: [True] * len(transfer.keys)}


class Told(Pools, Addresses):
    """Either kind of calls; writes down what stands before the keys of each."""

    calls: list[tuple[str, list[str] | None, list[str]]] = []  # noqa: RUF012

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        self.calls.append(("exists", extra_info and extra_info.prefix_keys, keys))
        return super().batch_exists(keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        return PoolTransferResult(self.batch_exists(keys, extra_info))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.calls.append(("get", extra_info and extra_info.prefix_keys, keys))
        return super().batch_get_v1(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.calls.append(("set", extra_info and extra_info.prefix_keys, keys))
        return super().batch_set_v1(keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        self.calls.append(("get", extra_info and extra_info.prefix_keys, transfers[0].keys))
        return super().batch_get_v2(transfers)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        self.calls.append(("set", extra_info and extra_info.prefix_keys, transfers[0].keys))
        return super().batch_set_v2(transfers)


class Keeps(Tensors):
    """As SGLang's file store: what lies under a key stays, and a read of another length is an exception."""

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        if key in self.objects and len(self.objects[key]) != target_location.numel():
            raise OSError("short read")
        return super().get(key, target_location)

    def set(self, key: str, value: torch.Tensor) -> bool:
        return key in self.objects or super().set(key, value)


class Raises(Tensors):
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        raise RuntimeError("planted")
