"""fio on the disk of a store: what the disk itself can do, in the same run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Final

from hicache_actors.errors import BackendError

JOBS: Final = 4
_FILE: Final = "fio.bench"


class FioLoop:
    """A `Mover`: ``count`` blocks of ``page_bytes``, past the page cache, by four processes that each have one request under way.

    The seconds are those that its own figure of bandwidth stands for; starting it is not counted.
    """

    def __init__(self, program: str, folder: Path, count: int, page_bytes: int) -> None:
        self._program, self._folder = program, folder
        self._count, self._page_bytes = count, page_bytes

    async def write(self, number: int) -> float:
        return await self._run("write")

    async def read(self, number: int) -> float:
        return await self._run("read")

    def close(self) -> None:
        for file in self._folder.glob(f"{_FILE}*"):
            os.unlink(file)

    async def _run(self, kind: str) -> float:
        """Raises `BackendError` if fio fails."""
        nbytes = self._count * self._page_bytes
        share = -(-self._count // JOBS) * self._page_bytes
        process = await asyncio.create_subprocess_exec(
            self._program, "--name=hicache", f"--directory={self._folder}", f"--filename_format={_FILE}.$jobnum",
            f"--rw={kind}", f"--bs={self._page_bytes}", f"--size={share}", f"--numjobs={JOBS}", "--direct=1",
            "--ioengine=psync", "--group_reporting", "--fallocate=posix", "--overwrite=1", "--output-format=json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
        if process.returncode:
            raise BackendError(f"fio: {errors.decode(errors='replace')[-300:]}", retryable=False)
        bytes_per_s: int = json.loads(out)["jobs"][0][kind]["bw_bytes"]
        return nbytes / bytes_per_s


def fio_program() -> str | None:
    return shutil.which("fio")
