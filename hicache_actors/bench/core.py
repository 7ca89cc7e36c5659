"""What Core's calls cost: 64 users of one system prompt, 8 turns each, pages of 64 tokens.

Every user's prompt grows from 16,384 shared tokens by 1,024 a turn to 24,576; together they hold 540,672 tokens.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from array import array
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from hicache_actors.core import Core, CoreConfig, CoreLease
from hicache_actors.keys.prompt import Prompt

RUNS = 5
PAGE = 64
USERS = 64
TURNS = 8
SHARED_TOKENS = 16_384
TURN_TOKENS = 1_024
FULL_TOKENS = SHARED_TOKENS + TURNS * TURN_TOKENS
TREE_PAGES = (SHARED_TOKENS + USERS * TURNS * TURN_TOKENS) // PAGE
EVICTED_TOKENS = 272_000
LEASE_TOKENS = 32_768
LEASE_NODES = 8
FLUSHED_BYTES = 32 << 20  # well beyond a core's caches

Times = dict[str, list[float]]


def run(options: Namespace, *, quiet: bool) -> dict[str, float]:
    """Medians of the best of 5 runs (``--quick``: of one), and that run's ``_p999`` and ``_max``.

    * ``prompt_24k_us``: ``Prompt`` of 24,576 tokens from an ``array('q')``;
    * ``match_24k_us``: that prompt, just made, all of it cached; ``_cold``: with the CPU caches flushed; ``_list``: made from
      a ``list[int]`` and matched;
    * ``insert_24k_us``: a commit by a lease that was opened on an empty tree, so it walks its whole prompt, finds the pages of
      others and of earlier turns, and publishes one turn; receipts and decision log on, no write policy; ``_list``: with the
      making of the prompt from a list;
    * ``evict_272k_ms``: one ``allocate`` that evicts 272,000 of the 540,672 tokens;
    * ``lease_32k_us``: lease and release of 32,768 cached tokens in 8 nodes;
    * ``hash_32k_page64_us``: the page hashes of a new prompt of 32,768 tokens.
    """
    runs: list[Times] = []
    for _ in range(1 if options.quick else RUNS):
        gc.collect()
        gc.disable()
        try:
            runs.append(_run())
        finally:
            gc.enable()
    out: dict[str, float] = {}
    for name in runs[0]:
        best = min((times[name] for times in runs), key=lambda times: sorted(times)[len(times) // 2])
        best.sort()
        out[name] = round(best[len(best) // 2], 3)
        out[f"{name}_p999"] = round(best[int(len(best) * 0.999)], 3)
        out[f"{name}_max"] = round(best[-1], 3)
    return out


def _run() -> Times:
    ids = [array("q", _ids(user, FULL_TOKENS)) for user in range(USERS)]
    core = _new_core(USERS * TURNS * FULL_TOKENS // PAGE)
    times = _time_inserts(core, ids)
    times |= _time_matches(core, ids)
    core.close()
    core = _new_core(TREE_PAGES)
    times |= _time_eviction(core, ids)
    core.close()
    core = _new_core(LEASE_TOKENS // PAGE + LEASE_NODES)
    times |= _time_leases(core)
    core.close()
    return times | _time_hashes()


def _new_core(device_pages: int) -> Core:
    return Core(CoreConfig(PAGE, device_pages, 0, write_policy="none", storage=False))


def _ids(user: int, length: int) -> list[int]:
    return [*range(SHARED_TOKENS), *range(user << 20, (user << 20) + length - SHARED_TOKENS)]


def _time_us(call: Callable[..., object], *args: object) -> float:
    started = perf_counter()
    call(*args)
    return (perf_counter() - started) * 1e6


def _turns(ids: Sequence[array[int]]) -> Iterator[tuple[int, int, str]]:
    """(user, tokens of the prompt so far, request), in the order in which the requests come."""
    for turn in range(1, TURNS + 1):
        for user in range(len(ids)):
            yield user, SHARED_TOKENS + turn * TURN_TOKENS, f"{user}.{turn}"


def _time_inserts(core: Core, ids: Sequence[array[int]]) -> Times:
    prompts = [Prompt(tokens) for tokens in ids]
    leases: list[CoreLease] = []
    for user, tokens, rid in _turns(ids):
        leases.append(core.lease(prompts[user], rid))
        core.allocate(leases[-1], tokens)
    commits, from_lists = [], []
    for lease, (user, tokens, _) in zip(leases, _turns(ids), strict=True):
        core.match(prompts[user])  # as a request does: the prompt is warm
        commits.append(_time_us(core.commit, lease, tokens))
        from_lists.append(commits[-1] + _time_us(Prompt, ids[user][:tokens].tolist()))
    for lease in leases:
        core.release(lease)
    return {"insert_24k_us": commits, "insert_24k_list_us": from_lists}


def _time_matches(core: Core, ids: Sequence[array[int]]) -> Times:
    times: Times = {"prompt_24k_us": [], "match_24k_us": [], "match_24k_cold_us": [], "match_24k_list_us": []}
    flood = bytearray(FLUSHED_BYTES)
    for round_ in range(TURNS):
        for tokens in ids:
            listed = tokens.tolist()
            times["prompt_24k_us"].append(_time_us(Prompt, tokens))
            prompt = Prompt(tokens)
            times["match_24k_us"].append(_time_us(core.match, prompt))
            times["match_24k_list_us"].append(_time_us(lambda listed=listed: core.match(Prompt(listed))))
            if round_ == 0:
                flood.count(1)  # reads all of it
                times["match_24k_cold_us"].append(_time_us(core.match, prompt))
    return times


def _time_eviction(core: Core, ids: Sequence[array[int]]) -> Times:
    prompts = [Prompt(tokens) for tokens in ids]
    for user, tokens, rid in _turns(ids):
        lease = core.lease(prompts[user], rid)
        core.allocate(lease, tokens - lease.capacity_tokens)
        core.commit(lease, tokens)
        core.release(lease)
    lease = core.lease(Prompt([]), "evictor")
    return {"evict_272k_ms": [_time_us(core.allocate, lease, EVICTED_TOKENS) / 1000]}


def _time_leases(core: Core) -> Times:
    ids = array("q", range(LEASE_TOKENS))
    for start in range(0, LEASE_TOKENS, LEASE_TOKENS // LEASE_NODES):
        branch = array("q", [1 << 40] * PAGE)  # somebody else's page: the path stays in as many nodes
        for tokens in (ids[: start + LEASE_TOKENS // LEASE_NODES], ids[:start] + branch):
            lease = core.lease(Prompt(tokens), "maker")
            core.allocate(lease, len(tokens) - lease.capacity_tokens)
            core.commit(lease, len(tokens))
            core.release(lease)
    prompt = Prompt(ids)
    return {"lease_32k_us": [_time_us(_lease_and_release, core, prompt) for _ in range(500)]}


def _lease_and_release(core: Core, prompt: Prompt) -> None:
    core.release(core.lease(prompt, "reader"))


def _time_hashes() -> Times:
    prompts = [Prompt(array("q", _ids(user, LEASE_TOKENS))) for user in range(32)]
    return {"hash_32k_page64_us": [_time_us(prompt.page_hashes, PAGE, LEASE_TOKENS // PAGE) for prompt in prompts]}
