"""Mutants of the headers that a GPU's kernel is made of: each is a mistake, and each must be found by the cases.

Started with the libraries to try, this prints which of them pass for right.  It forks for each, because a mutant may crash or
never end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from hicache_actors.cuda_ext.native.copies import Copies, plans
from hicache_actors.cuda_ext.native.library import Library
from hicache_actors.cuda_ext.native.structs import Stores
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.copy_cases import Case, Sides, cases

LIMIT_S: Final = 60


class Mutant(NamedTuple):
    header: str
    was: str
    becomes: str


MUTANTS: Final = (
    # Which runs a worker has, and which part of each a lane has.
    Mutant("copy.h", "chunk = worker; chunk < chunks", "chunk = worker + 1; chunk < chunks"),
    Mutant("copy.h", "chunk < chunks; chunk += workers", "chunk < chunks; chunk += workers + 1"),
    Mutant("copy.h", "chunk < chunks; chunk += workers", "chunk < chunks; chunk += 1"),
    Mutant("copy.h", "chunk < chunks; chunk += workers", "chunk + 1 < chunks; chunk += workers"),
    Mutant("copy.h", "chunks = plan.runs * chunks_a_run", "chunks = plan.runs"),
    Mutant("copy.h", "run = chunk / chunks_a_run", "run = chunk"),
    Mutant("copy.h", "skip = chunk % chunks_a_run * HIC_CHUNK_BYTES", "skip = 0"),
    Mutant("copy.h", "left = plan.run_bytes - skip", "left = plan.run_bytes"),
    Mutant("copy.h", "(left < HIC_CHUNK_BYTES ? left : HIC_CHUNK_BYTES)", "(left)"),
    Mutant("copy.h", "(left < HIC_CHUNK_BYTES ? left : HIC_CHUNK_BYTES)", "(HIC_CHUNK_BYTES)"),
    Mutant("copy.h", "(plan.run_bytes + HIC_CHUNK_BYTES - 1) / HIC_CHUNK_BYTES", "plan.run_bytes / HIC_CHUNK_BYTES"),
    Mutant("copy.h", "at.source + skip", "at.source"),
    Mutant("copy.h", "at.target + skip", "at.target"),
    Mutant("copy.h", "uint32_t unit = lane", "uint32_t unit = 0"),
    Mutant("copy.h", "unit + (HIC_UNROLL - 1) * lanes < units", "unit + (HIC_UNROLL - 1) * lanes <= units"),
    Mutant("copy.h", "unit + (HIC_UNROLL - 1) * lanes < units", "unit < units"),
    Mutant("copy.h", "unit += HIC_UNROLL * lanes", "unit += lanes"),
    Mutant("copy.h", "unit += HIC_UNROLL * lanes", "unit += (HIC_UNROLL + 1) * lanes"),
    Mutant("copy.h", "memory.load(source + unit + i * lanes)", "memory.load(source + unit + i)"),
    Mutant("copy.h", "memory.store(target + unit + i * lanes", "memory.store(target + unit + i"),
    Mutant("copy.h", "lanes, held[i])", "lanes, held[0])"),
    Mutant("copy.h", "for (; unit < units; unit += lanes)", "for (; unit + 1 < units; unit += lanes)"),
    Mutant("copy.h", "for (; unit < units; unit += lanes)", "for (; unit < units; unit += 1)"),
    Mutant("copy.h", "for (; unit < units; unit += lanes)", "if (unit < units)"),
    Mutant("copy.h", "memory.store(target + unit, memory.load(source + unit))", "memory.store(target + unit, Unit{})"),
    Mutant("copy.h", "static_cast<uint32_t>(sizeof(Unit))", "16u"),
    # Units.
    Mutant("copy.h", "case 16: return hic_lane_of<hic_vector>", "case 16: return hic_lane_of<uint64_t>"),
    Mutant("copy.h", "case 8: return hic_lane_of<uint64_t>", "case 8: return hic_lane_of<hic_vector>"),
    Mutant("copy.h", "case 4: return hic_lane_of<uint32_t>", "case 4: return hic_lane_of<uint64_t>"),
    Mutant("copy.h", "case 2: return hic_lane_of<uint16_t>", "case 2: return hic_lane_of<uint8_t>"),
    Mutant("copy.h", "default: return hic_lane_of<uint8_t>", "default: return hic_lane_of<uint16_t>"),
    # Who is who in a grid.
    Mutant("copy.h", "workers_a_block = threads / lanes", "workers_a_block = threads"),
    Mutant("copy.h", "block * workers_a_block + thread / lanes", "block + thread / lanes"),
    Mutant("copy.h", "block * workers_a_block + thread / lanes", "block * workers_a_block + thread % lanes"),
    Mutant("copy.h", "blocks * workers_a_block, thread", "workers_a_block, thread"),
    Mutant("copy.h", "thread % lanes,", "thread / lanes,"),
    # Where a run is.
    Mutant("plan.h", "int i = HIC_LEVELS - 1; i >= 0", "int i = HIC_LEVELS - 1; i > 0"),
    Mutant("plan.h", "int i = HIC_LEVELS - 1; i >= 0", "int i = HIC_LEVELS - 3; i >= 0"),
    Mutant("plan.h", "i < static_cast<int>(plan.levels)", "i + 1 < static_cast<int>(plan.levels)"),
    Mutant("plan.h", "index = run % level.extent", "index = run"),
    Mutant("plan.h", "run /= level.extent", "run /= level.extent + 1"),
    Mutant("plan.h", "level.kind == HIC_PIECE", "level.kind == HIC_PAGE"),
    Mutant("plan.h", "level.kind == HIC_PAGE", "level.kind == HIC_LEVELS"),
    Mutant("plan.h", "tables.pieces[index].source", "tables.pieces[0].source"),
    Mutant("plan.h", "tables.pieces[index].target", "tables.pieces[0].target"),
    Mutant("plan.h", "at.source += tables.pieces", "at.source = tables.pieces"),
    Mutant("plan.h", "level.source_stride * tables.source_pages", "level.source_stride * tables.target_pages"),
    Mutant("plan.h", "level.target_stride * tables.target_pages", "level.target_stride * tables.source_pages"),
    Mutant("plan.h", "level.source_stride * tables.source_pages", "level.target_stride * tables.source_pages"),
    Mutant("plan.h", "tables.target_pages[index]", "index"),
    Mutant("plan.h", "level.source_stride * index", "level.target_stride * index"),
    Mutant("plan.h", "level.target_stride * index", "level.source_stride * index"),
    Mutant("plan.h", "(plan.source_pages)", "(plan.target_pages)"),
)


def chosen() -> list[Case]:
    """Small, and of every kind: units of 1 to 16 bytes, one chunk a run and several."""
    found = random.Random(1).sample([case for case in cases() if case.shape.page_size < 16], 40)
    long_runs = KVShape(layers=1, kv=2, heads=4, head_dim=72, dtype="float32", page_size=16)  # 18,432 bytes: 2 chunks
    twelve_units = KVShape(layers=2, kv=2, heads=2, head_dim=48, dtype="float32", page_size=4)  # for 4 lanes: 3 each
    return [
        *found,
        Case(5000, long_runs, "page_first_direct", 0, "contiguous", True, (0, 1), 3, True),
        Case(5001, twelve_units, "page_head", 0, "contiguous", True, (0, 2), 3, True),
    ]


def finds_nothing(copies: Copies, sides: Sides) -> bool:
    """Whether the kernel's body on a grid does all that it should and nothing else."""
    copy = sides.work().affine()
    target = sides.target_bytes
    sides.reset()
    for number, plan in enumerate(plans(copy)):
        unit = plan.unit_bytes
        units = target.numel() // unit
        counts = np.zeros(units, dtype=np.uint8)
        stores = Stores(base=target.data_ptr(), units=units, counts=counts.ctypes.data)
        lanes = (4, 8, 32)[(sides.case.number + number) % 3]
        copies.grid(plan, 2, lanes * 3, lanes, stores)
        right = stores.total == plan.runs * plan.run_bytes // unit == int((counts == 1).sum())
        if not right or stores.outside or stores.misaligned:
            return False
    return not sides.wrong_bytes()


def survives(path: str, all_sides: list[Sides]) -> bool:
    """In a child of its own: a mutant may do anything."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        signal.alarm(LIMIT_S)
        copies = Copies(Library(Path(path)))
        os._exit(0 if all(finds_nothing(copies, sides) for sides in all_sides) else 1)
    _, status = os.waitpid(child, 0)
    return status == 0


def main(paths: list[str]) -> None:
    torch.set_num_threads(1)  # a pool of threads would not live on in the children
    all_sides = [Sides(case) for case in chosen()]
    print(json.dumps([survives(path, all_sides) for path in paths]))


if __name__ == "__main__":
    main(sys.argv[1:])
