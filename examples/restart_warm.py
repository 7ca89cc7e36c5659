"""Kill a server in the middle of its work, start it again on the same folder, and see what comes back.

``python examples/restart_warm.py``.  The first server answers prompt after prompt and is killed with SIGKILL while it writes.  The
second one opens the folder, answers the same prompts, and checks every byte that it reuses: what was stored whole comes back, what
was being written is a miss.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE_SIZE = 16


async def serve(folder: str, prompts: int | None) -> None:
    """A server with a toy engine.  It answers ``prompts`` prompts, or goes on until it is killed."""
    from hicache_actors import Config, HiCache, HostConfig, KVShape, KVTensors, ModelFacts, Prompt, StorageConfig
    from hicache_actors.testing.engines import LoopEngine
    from hicache_actors.testing.toy_model import ToyModel  # raises if reused KV is not that of the prompt

    shape = KVShape(layers=4, kv=2, heads=2, head_dim=16, dtype="float32", page_size=PAGE_SIZE)
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=128),
        model=ModelFacts(model_id="toy", weights="v1"),
        storage=StorageConfig(url=f"file://{folder}", prefetch_threshold_tokens=PAGE_SIZE),
    )
    kv = KVTensors.make(shape, pages=64)
    async with HiCache.open(config, kv) as cache:
        engine = LoopEngine(cache, ToyModel(kv))
        for number in itertools.count() if prompts is None else range(prompts):
            prompt = Prompt(
                [*range(200), *range(1000 * number, 1000 * number + 300)]
            )  # a shared start, and a part of its own
            account = (await engine.answer(prompt)).account
            if prompts is None:
                stored = await cache.stored(prompt, deadline_s=10.0)
                print(f"stored {stored.tokens}", flush=True)
            else:
                print(f"account {account.device} {account.host} {account.storage} {account.computed}", flush=True)


def start(folder: str, prompts: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--folder", folder, "--serve", str(prompts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_life(folder: str, prompts: int) -> None:
    """Kill it as soon as ``prompts`` prompts are stored; the next one is on its way then."""
    with start(folder, 0) as server:
        assert server.stdout is not None
        for number, line in enumerate(server.stdout, 1):
            print(f"first server:  prompt {number}: {line.split()[1]} tokens are stored")
            if number == prompts:
                server.kill()
                break
        else:
            raise SystemExit("the first server has failed")
    print(f"killed; the folder holds {sum(file.suffix == '.kv' for file in Path(folder).rglob('*'))} pages")


def second_life(folder: str, prompts: int) -> int:
    """-> tokens that came back from the folder; raises if the server failed."""
    storage_tokens = 0
    with start(folder, prompts + 1) as server:
        assert server.stdout is not None
        for number, line in enumerate(server.stdout, 1):
            device, host, storage, computed = map(int, line.split()[1:])
            storage_tokens += storage
            print(
                f"second server: prompt {number}: {device:4} tokens from the device, {host:4} from the host, "
                f"{storage:4} from storage, {computed:4} computed"
            )
    if server.returncode != 0:
        raise SystemExit("the second server has failed")
    return storage_tokens


def main(prompts: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        first_life(folder, prompts)
        came_back = second_life(folder, prompts)
    print(f"came back from storage: {came_back} tokens, every byte as it was")
    return 0 if came_back else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a server, start it again on the same folder: what comes back?")
    parser.add_argument("--prompts", type=int, default=6, help="prompts before the first server is killed (default: 6)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prompts < 1:
        parser.error("--prompts: at least 1")
    if options.serve is not None:
        asyncio.run(serve(options.folder, options.serve or None))
    else:
        sys.exit(main(options.prompts))
