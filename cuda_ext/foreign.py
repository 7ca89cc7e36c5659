"""Streams and events of the engine: what CUDA devices take of them, without importing torch."""

from __future__ import annotations

from typing import Final

from hicache_actors.errors import UsageError

CAPTURED: Final = (
    "this stream is being captured in a CUDA graph, which would replay a wait for the copies of this load and no others: capture "
    "piecewise, a graph for each layer or group of layers, and call stream_wait between their replays; or wait for the last "
    "layer before a graph of the whole forward pass is replayed"
)

SUBMITTED_S: Final = 30.0
"""How long a forward thread waits for a load that has not been handed to the GPU yet."""


def stream_handle(stream: object) -> int:
    """The CUstream.  Raises `UsageError` for what is none."""
    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise UsageError(f"{stream!r} is no CUDA stream: give a torch.cuda.Stream, or the number of a CUstream")
    return handle


def event_handle(event: object) -> int | None:
    """The CUevent of a torch.cuda.Event that has been recorded; None for anything else."""
    handle = getattr(event, "cuda_event", None)
    return handle if isinstance(handle, int) and handle else None
