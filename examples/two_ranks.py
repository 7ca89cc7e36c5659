"""One engine on two ranks, each with half of the heads: ``torchrun --nproc-per-node 2 examples/two_ranks.py``.

Started as ``python examples/two_ranks.py`` it starts itself that way.  Both ranks make the same calls in the same order, as tensor
parallelism has it; copies and reads end when they end on each rank, and what is found in the cache is agreed once per step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter

import anyio.to_thread
import torch.distributed as dist

from hicache_actors import Config, HiCache, HostConfig, KVShape, KVTensors, ModelFacts, Prompt, RankGroup, StorageConfig
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.toy_model import ToyModel

PAGE_SIZE = 16
HEADS = 4  # of the whole model
SOURCES = ("device", "host", "storage", "computed")


async def serve(rank: int, size: int, epoch: int, folder: str, turns: list[dict[str, Prompt]]) -> Counter[str]:
    """-> prompt tokens by where they came from: the same on all ranks."""
    shape = KVShape(layers=4, kv=2, heads=HEADS // size, head_dim=8, dtype="float32", page_size=PAGE_SIZE)
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=96),
        model=ModelFacts(model_id="toy", weights="v1", total_kv_heads=HEADS),
        storage=StorageConfig(url=f"file://{folder}", prefetch_threshold_tokens=4 * PAGE_SIZE),
    )
    ranks = RankGroup(tp_rank=rank, tp_size=size, epoch=epoch)  # they meet in the store that torchrun keeps
    kv = KVTensors.make(shape, pages=32)
    found: Counter[str] = Counter()
    async with HiCache.open(config, kv, driver="step", ranks=ranks) as cache:
        engine = StepEngine(cache, ToyModel(kv), lockstep=True)  # its model raises if reused KV has a wrong byte
        for turn in turns:
            answers = await anyio.to_thread.run_sync(engine.run, list(turn.items()))
            for rid in turn:
                found.update({source: getattr(answers[rid].account, source) for source in SOURCES})
        engine.close()
        await cache.drain(10.0, stepping=True)  # the engine has stopped: the ranks write what is left, together
    return found


async def main(prompts: int, folder: str) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    topics = [Prompt([*range(100), *range(1000 * topic, 1000 * topic + 140)]) for topic in range(1, prompts + 1)]
    turns = [{f"t{turn}.{at}": topic for at, topic in enumerate(topics)} for turn in range(2)]
    good = True
    for epoch, name in enumerate(("first life", "after a restart")):
        found = await serve(rank, size, epoch, folder, turns[: 2 - epoch])
        everywhere: list[Counter[str]] = [Counter() for _ in range(size)]
        dist.all_gather_object(everywhere, found)
        equal = all(other == found for other in everywhere)
        good = good and equal and (found["host"] > 0 if epoch == 0 else found["storage"] > 0)
        if rank == 0:
            print(f"{name}: " + " + ".join(f"{found[source]} {source}" for source in SOURCES), "tokens on each rank")
            print(f"  hits equal on all {size} ranks: {'yes' if equal else everywhere}")
    return 0 if good else 1


def start_ranks(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        quiet = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }  # else torchrun says that it chose this
        return subprocess.run([*command, __file__, *arguments, "--folder", folder], env=quiet, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One engine on two ranks.")
    parser.add_argument("--prompts", type=int, default=6, help="different prompts, each served twice (default: 6)")
    parser.add_argument("--folder", help="of the store; under torchrun the same for all ranks")
    options = parser.parse_args()
    if options.prompts < 4:
        parser.error("--prompts: at least 4, for fewer fit on the device")
    if "RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv[1:]))
    if options.folder is None:
        parser.error("--folder is needed under torchrun")
    dist.init_process_group("gloo")  # the engine's own group; the cache makes one for itself
    status = asyncio.run(main(options.prompts, options.folder))
    dist.destroy_process_group()
    sys.exit(status)
