"""Tests marked ``gpu(n)`` run where torch sees n CUDA devices that can be opened, and say elsewhere why they do not."""

from __future__ import annotations

import pytest
import torch

from hicache_actors.cuda_ext import open_device
from hicache_actors.errors import ConfigError


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed, found = marker.args[0], torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} CUDA devices, this machine has {found}")
    try:
        open_device("cuda:0").close(10.0)
    except ConfigError as error:
        pytest.skip(str(error))
