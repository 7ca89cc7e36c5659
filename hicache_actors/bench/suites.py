"""The suites of `hicache bench` in words: what each measures, and what it may be told.  Light: nothing is imported to show help."""

from __future__ import annotations

from typing import Final, NamedTuple


class Suite(NamedTuple):
    """``options``: flags that the suite takes, beside --json.  Each of ``modules`` has ``run(options, *, quiet) -> Figures``."""

    modules: tuple[str, ...]
    about: str
    help: str
    options: tuple[str, ...] = ()


_CORE: Final = """\
Times the decisions of the cache on this machine.  Nothing is copied: these are the costs that an engine's step pays.

  prompt_24k    make a Prompt of 24,576 tokens            match_24k   look it up, 16,384 tokens shared
  insert_24k    publish it at commit                      evict_272k  drop 272,000 of 540,672 tokens in one call
  lease_32k     lease and release 32,768 tokens           tell, ask   one message to an actor, without and with an answer
  hash_32k      page hashes of 32,768 tokens, page 64

In a tree of a million nodes (16 s, 1.3 GB of memory):

  evict_64_at_1m           evict 64 pages in one call, lru; _lfu: by hit counts
  touch_all_then_evict_ms  the first of these after every node has been used again
  change_order_slice       what going over to lfu adds to a section
  alloc_free_1m_slots      64 slots out of a pool of a million, and back
  gc_1m_nodes_ms           a full collection beside it (< 50)
  bytes_per_node           with its page of 64 tokens, which takes 512

Names end in their unit (_us, _ms) and hold the median; where there are tails, *_p999 and *_max stand beside it.
Compare figures of one run on one machine only; other processes slow down all of them.
"""

_STORAGE: Final = """\
Times the storage tier on a store of yours: 128 pages of 1 MiB and 512 of 64 KiB, written by backup jobs and read by prefetch
jobs.

  pages_1m, pages_64k
    write_gb_s, read_gb_s    medians, in 1e9 bytes of KV a second
    ratio_write, ratio_read  against a plain executor loop: the same calls on the same disk, a page a hop.  >= 0.8 is good
    batched_ratio_*          against that loop with a batch a hop, as the library does it: what checksums, keys, lookups and
                             decisions cost beside the copies
    peer_ratio_*             against one thread with an open, a write or read and a copy per page, as the file backends of
                             other caches do it (from a source tree only: benchmarks/peers)
    fio_*_gb_s, fio_ratio_*  for slab://, where fio is installed: the disk itself, past the page cache, four processes
    file_ratio_*             for slab://: against the same pipelines over file://, in a folder on the same disk
    read_cold_gb_s           of a store on this disk, when the page cache has nothing of it
    core_s_per_gb            processor time of this process for a gigabyte, written and read, checksums included
  waiter_delay_us            from the last byte of a fetch until the coroutine that waits for it runs
  loop_lag_p99_ms            how late the event loop wakes sleepers while pages move at full speed

Ratios are of speeds, medians of pairs in one round.  Other reads than the cold ones come from the page cache, where the store
uses it: they time the library, not the disk.  A store whose slots have one length is given a folder for each size.
Other processes disturb both halves of a pair, so trust the ratios, and repeat on a quiet machine.  Takes about half a minute
and 4 GB of the store (6 for slab://), which are given back at the end.  A file system that has lost many files in the last
minutes may make new ones a hundred times more slowly (ext4 without a journal): then wait, or give a folder elsewhere.
"""

_SERVING: Final = """\
Serves a small random Llama (4 layers, on the CPU, one thread) and times what requests feel of the cache.  Needs transformers.

  ttft_ms            new prompt of 256 tokens: from its submission to its first token, alone on the engine
  ttft_cached_ms     the same prompts, when host and storage have them and the device has not
  itl_idle_ms        between two tokens of 4 running answers; no tier moves anything
  itl_busy_ms        the same, while loads, write-backs, backups and prefetches run without a pause
  busy_gb_s          what moved meanwhile, all directions together, in 1e9 bytes a second
  request_ms         a new prompt of 256 tokens and 4 tokens of answer, with all tiers on
  overhead_ms_p50    that request minus the same with the cache switched off: median of pairs
  overhead_cpu_ms_p50
                     the same of processor time, with all that is stored after the end of the request
  bare_ms_p50        the same request in a bare loop of forward passes, without engine and cache

Figures without p50 in their name have p50 and p99.  Takes about a minute.
Absolute times are this CPU's; compare them within one run.
"""

_REPORTS: Final = """\
What public bug reports have measured on other caches, measured on this one; each named by its number.

  P04   backup bookkeeping when 64 requests end in one step    P05   copies submitted per write-back and load
  P06   one eviction call at 1 k, 10 k and 50 k leaves         P08   what waiting I/O threads take from a busy main thread
  P09   a fetch inside a busy process against a bare loop      P10   last byte in until the request may run, 200 in line
  P11   a small fetch behind a large, slow one                 P12   what each stop policy waits for, and what it gets
  P13   24 prompts asked a second time: hit rate, refusals     P26   host pages that a storage miss evicts

Where a limit is known it stands beside the figure, as ..._limit.  Takes less than a minute.
"""

_RANKS: Final = """\
Agreement between ranks: 2 and 4 processes on this machine, over gloo and over TCP, with 1 and with 200 jobs open.

  bare_round_us             one reduction of a round's vector, and nothing else
  collectives_per_step      what a step costs the network; open jobs may not change it
  begin_step_wait_us        what `begin_step` waits for its round after a step that sleeps 10 ms, in which the round travels
  begin_step_us             the whole of `begin_step` in such a step: that wait, and what is done with its outcome
  end_step_us               `end_step`, which issues the round
  matmul                    the same after steps of about 10 ms of matrix products on all ranks (2 processes)
  alone                     the same on one rank, where nobody is waited for: the work, as slow as it is on cold caches
  idle_cpu_percent          of a core, of each rank, while all wait 10 s for the leader's intake (< 0.2)

Figures are of rank 0, the worst rank's for idle_cpu_percent.  Takes about two minutes; --quick shortens each part.
"""

_TRANSFER: Final = """\
Times copies between KV tensors and host slots on the CPU device, for each shape, host layout and direction: 64 MiB, to and from
every other page of both sides, in another order.

  gb_s              by the device, as loads and write-backs go: 1e9 bytes a second
  memcpy_gb_s       one memcpy for each contiguous run of the same copy, in the order of the target, on as many threads
  memcpy_flat_gb_s  one memcpy of as many bytes, for scale
  torch_gb_s        index_select and index_copy_, a layer at a time, with torch's threads
  run_bytes         how long the runs are
  ratio_memcpy      gb_s against memcpy_gb_s; ratio_torch against torch_gb_s: medians of pairs in one round

Needs the native library.  Takes about a minute and 0.6 GB.  Other processes disturb both halves of a pair, so trust the ratios.
"""

_COMPLETIONS: Final = """\
Times how the end of a copy on the native CPU device reaches whoever waits for it, on asyncio and, where it is installed, uvloop.

  wake_us_1, wake_us_64    from the end of native work until the coroutine runs, with 1 and with 64 in flight: one ring, one eventfd
  wake_us_1_by_thread      the same without the ring: a thread of Python and call_soon_threadsafe
  idle_cpu_percent         of a core, while 64 coroutines wait for 10 s and nothing ends (< 0.2)
  tickets, tickets_lost    100,000 ends awaited by 64 coroutines on 4 streams; none may be lost
  ticket_us                one of them, submitting it included; tickets_per_wake_up: ends for one write to the eventfd
  layers                   loads of 16, 32 and 64 layers, 2 ms each: submit_us, first_layer_ms until a forward may begin,
                           whole_load_ms, and share: the one by the other (a quarter at most)

Needs the native library.  Takes about a minute.  Other processes disturb the tails most.
"""

SUITES: Final[dict[str, Suite]] = {
    "ranks": Suite(
        ("hicache_actors.bench.ranks",), "agreement between ranks: rounds, waits, idle cost", _RANKS, ("--quick",)
    ),
    "core": Suite(
        ("hicache_actors.bench.core", "hicache_actors.bench.million", "hicache_actors.bench.runtime"),
        "what decisions and messages cost; copies nothing",
        _CORE,
        ("--quick",),
    ),
    "storage": Suite(
        ("hicache_actors.bench.storage",),
        "pages to a store and back, beside plain loops",
        _STORAGE,
        ("--url", "--rounds", "--quick"),
    ),
    "transfer": Suite(
        ("hicache_actors.bench.transfer",),
        "copies between device and host, beside memcpy and torch",
        _TRANSFER,
        ("--threads", "--quick"),
    ),
    "completions": Suite(
        ("hicache_actors.bench.completions",),
        "how the end of a copy reaches who waits for it",
        _COMPLETIONS,
        ("--quick",),
    ),
    "serving": Suite(
        ("hicache_actors.bench.serving",),
        "what requests feel of the cache, with a small model",
        _SERVING,
        ("--url", "--quick"),
    ),
    "reports": Suite(
        ("hicache_actors.bench.reports",),
        "complaints about other caches, measured on this one",
        _REPORTS,
        ("--quick",),
    ),
}
