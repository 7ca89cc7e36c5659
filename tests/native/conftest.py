"""Fixtures of the native tests."""

from __future__ import annotations

from .gpu_stub import stub, stub_folder, stub_library

__all__ = ["stub", "stub_folder", "stub_library"]
