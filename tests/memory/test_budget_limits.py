"""What this process may use, read from trees of cgroup v1, v2 and both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.memory.limits import MACHINE, MemoryLimit, MemorySource, ranks_per_host

BIG = MemorySource(MACHINE, 64_000, 60_000)
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
ROOT_MOUNT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"


class Tree:
    """A machine's /proc and cgroup mounts below a folder."""

    def __init__(self, root: Path, cgroup: str, mountinfo: str) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
        (root / "proc/self/mountinfo").write_text(ROOT_MOUNT + mountinfo)

    def group(self, path: str, **files: str | int) -> None:
        """``max="700"`` writes memory.max; ``stat`` is written as given."""
        folder = self.root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")

    def read(self, machine: MemorySource = BIG) -> MemoryLimit:
        return MemoryLimit.read(root=self.root, machine=machine)

    def found(self) -> dict[str, tuple[int, int]]:
        prefix = f"{self.root}/sys/fs/cgroup/"
        return {s.where.removeprefix(prefix): (s.limit_bytes, s.free_bytes) for s in self.read().sources[1:]}


def test_v2_takes_every_limit_on_the_path_and_counts_page_cache_as_free(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/pods/serving/worker\n", V2_MOUNT)
    tree.group("pods", max=9000, high=8000, current=6000, stat="anon 3\ninactive_file 1500\nactive_file 500\nfile 5000")
    tree.group("pods/serving", max="max", high="max", current=5000, stat="inactive_file 1")
    tree.group("pods/serving/worker", max=7000, high="max", current=3200, stat="inactive_file 200\nactive_file 0")
    tree.group("pods/neighbour", max=10, current=10)
    assert tree.found() == {
        "pods/serving/worker/memory.max": (7000, 4000),
        "pods/memory.max": (9000, 5000),
        "pods/memory.high": (8000, 4000),
    }
    limit = tree.read()
    assert (limit.total_bytes, limit.available_bytes) == (7000, 4000)
    assert limit.decided_by.endswith("worker/memory.max")


def test_the_total_and_what_is_free_may_be_bound_by_different_groups(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a/b\n", V2_MOUNT)
    tree.group("a", max=20_000, current=19_000)  # a neighbour in it is large
    tree.group("a/b", max=5000, current=100)
    limit = tree.read()
    assert (limit.total_bytes, limit.available_bytes) == (5000, 1000)


def test_a_tight_machine_is_tighter_than_any_group(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNT)
    tree.group("a", max=50_000, current=0)
    limit = tree.read(MemorySource(MACHINE, 40_000, 300))
    assert (limit.total_bytes, limit.available_bytes, limit.decided_by) == (40_000, 300, MACHINE)


def test_v1_knows_no_limit_only_as_a_huge_number(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/jobs/7\n0::/\n", V1_MOUNT)
    huge = 9223372036854771712
    tree.group("memory", limit_in_bytes=huge, usage_in_bytes=1)
    tree.group("memory/jobs", limit_in_bytes=6000, usage_in_bytes=2500, stat="inactive_file 9\ntotal_inactive_file 400")
    tree.group("memory/jobs/7", limit_in_bytes=huge, usage_in_bytes=1)
    assert tree.found() == {"memory/jobs/memory.limit_in_bytes": (6000, 3900)}


def test_a_hybrid_system_counts_both_versions(tmp_path: Path) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    tree = Tree(tmp_path, "4:memory:/old\n0::/new\n", V1_MOUNT + unified)
    tree.group("memory/old", limit_in_bytes=3000, usage_in_bytes=0)
    tree.group("unified/new", max=2000, current=500)
    assert tree.found() == {
        "memory/old/memory.limit_in_bytes": (3000, 3000),
        "unified/new/memory.max": (2000, 1500),
    }


@pytest.mark.parametrize("cgroup", ["4:memory:/docker/c0ffee/serving\n", "4:memory:/docker/c0ffee/serving\n0::/\n"])
def test_in_a_container_the_mount_shows_a_part_of_the_hierarchy(tmp_path: Path, cgroup: str) -> None:
    mount = V1_MOUNT.replace("0:32 / /sys", "0:32 /docker/c0ffee /sys")
    tree = Tree(tmp_path, cgroup, mount)
    tree.group("memory", limit_in_bytes=5000, usage_in_bytes=1000)
    tree.group("memory/serving", limit_in_bytes=4500, usage_in_bytes=0)
    assert tree.found() == {
        "memory/serving/memory.limit_in_bytes": (4500, 4500),
        "memory/memory.limit_in_bytes": (5000, 4000),
    }


@pytest.mark.parametrize("path", ["/../../elsewhere", "/other/place"])
def test_outside_of_the_mounted_part_its_top_still_limits(tmp_path: Path, path: str) -> None:
    tree = Tree(tmp_path, f"0::{path}\n", V2_MOUNT.replace("0:28 / /sys", "0:28 /docker/1 /sys"))
    tree.group("", max=800, current=100)
    assert list(tree.found().values()) == [(800, 700)]


def test_use_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNT)
    tree.group("a", high=100, current=900)  # memory.high only slows down
    assert tree.read().available_bytes == 0


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert MemoryLimit.read(root=tmp_path, machine=BIG) == MemoryLimit(64_000, 60_000, (BIG,))


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a\n", r"31 23 0:28 / /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup2 rw" + "\n")
    tree.group("my groups/a", max=70, current=0)
    assert tree.found() == {"my groups/a/memory.max": (70, 70)}


def test_this_machine_has_a_limit() -> None:
    memory = MemoryLimit.read()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert memory.sources[0].where == MACHINE


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        (None, {}, (1, "default")),
        (4, {"LOCAL_WORLD_SIZE": "8"}, (4, "argument")),
        (None, {"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "2"}, (8, "LOCAL_WORLD_SIZE")),
        (None, {"LOCAL_WORLD_SIZE": " ", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        (None, {"SLURM_NTASKS_PER_NODE": "8(x2)"}, (8, "SLURM_NTASKS_PER_NODE")),
    ],
)
def test_ranks_per_host(asked: int | None, environment: dict[str, str], expected: tuple[int, str]) -> None:
    assert ranks_per_host(asked, environment) == expected


@pytest.mark.parametrize(
    ("asked", "environment", "field"),
    [
        (0, {}, "ranks_per_host"),
        (True, {}, "ranks_per_host"),
        (None, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        (None, {"LOCAL_WORLD_SIZE": "eight"}, "LOCAL_WORLD_SIZE"),
        (None, {"SLURM_NTASKS_PER_NODE": "8,4"}, "SLURM_NTASKS_PER_NODE"),
    ],
)
def test_a_number_of_ranks_that_is_none_is_refused(asked: int | None, environment: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ranks_per_host(asked, environment)
    assert caught.value.field == field
