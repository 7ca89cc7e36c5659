"""``hicache doctor``: what it sees, what it says about it, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from hicache_actors.backends.file import FileBackend
from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.switches import DISABLED_VARIABLE
from hicache_actors.command import cli, surroundings
from hicache_actors.command.doctor import Diagnosis, examine
from hicache_actors.command.surroundings import Section, device, disk, environment, memory, packages
from hicache_actors.cuda_ext import TorchCudaDevice
from hicache_actors.errors import BackendError, ConfigError, TransferError
from hicache_actors.keys import KeyScheme, Namespace, Rank, SuffixKeys
from hicache_actors.memory import disks
from hicache_actors.memory.disks import Probe, disk_of, probe_disk
from hicache_actors.memory.limits import MACHINE, RANK_COUNTS, MemoryLimit, MemorySource
from hicache_actors.runtime.workers import Workers

GIB = 2**30
LIMIT = MemoryLimit(64 * GIB, 60 * GIB, (MemorySource(MACHINE, 64 * GIB, 60 * GIB),))
GOOD = """
[shape]
layers = 30
heads = 3
head_dim = 64
dtype = "bfloat16"
[device]
pages = 10
[model]
model_id = "tiny"
weights = "1"
total_kv_heads = 3
"""


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no OpenMP settings, and one kind of disk, whatever the machine that runs the tests has."""
    hurting = [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_"))]
    for name in [*RANK_COUNTS, *hurting, DISABLED_VARIABLE, "PYTHONASYNCIODEBUG", "PYTHONDEVMODE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disks, "_filesystem", lambda folder: "ext4")
    monkeypatch.setattr(surroundings, "LOW_SPACE_BYTES", 0)


def write_config(folder: Path, text: str = GOOD, *, url: str | None = None) -> Path:
    file = folder / "cache.toml"
    file.write_text(text + (f'[storage]\nurl = "{url}"\n' if url else ""))
    return file


def texts(section: Section, severity: str = "problem") -> list[str]:
    return [finding.text for finding in section.findings if finding.severity == severity]


# -- environment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "severity", "words"),
    [
        ({}, "note", "GOMP_SPINCOUNT is not set"),
        ({"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "active"}, "problem", "OMP_WAIT_POLICY=ACTIVE"),
        ({"GOMP_SPINCOUNT": "infinite"}, "problem", "GOMP_SPINCOUNT=infinite"),
        ({"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "infinite"}, "problem", "KMP_BLOCKTIME"),
        ({"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "9,2"}, "problem", "OMP_NUM_THREADS=9 on 8 usable cores"),
        ({"GOMP_SPINCOUNT": "0", "PYTHONASYNCIODEBUG": "1"}, "note", "debug mode"),
    ],
)
def test_settings_that_hurt(variables: dict[str, str], severity: str, words: str) -> None:
    (finding,) = environment(variables, cores=8).findings
    assert finding.severity == severity
    assert words in finding.text
    assert finding.fix


def test_quiet_settings_are_only_shown() -> None:
    section = environment({"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "8"}, cores=8)
    assert section.findings == ()
    assert section.facts["openmp"] == {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}
    assert section.facts["python"].startswith("3.")
    assert section.facts["torch"]
    assert section.facts["numpy"]


# -- device ------------------------------------------------------------------------------------------------------------


def no_torch() -> NoReturn:
    raise ImportError("no torch here")


def fake_torch(*, cuda: str | None, devices: int) -> Any:
    return SimpleNamespace(
        __version__="9.9",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            mem_get_info=lambda index: (5 * GIB, 80 * GIB),
            get_device_name=lambda index: f"GPU {index}",
        ),
    )


def test_without_a_driver_torch_is_not_even_imported(tmp_path: Path) -> None:
    section = device(root=tmp_path, load_torch=no_torch)
    assert texts(section) == []
    assert section.facts["nvidia_driver"] is False
    assert section.facts["cuda_device"].startswith("none: no NVIDIA driver (/proc/driver/nvidia/version or ")


def test_the_native_library_is_named_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "library", lambda: SimpleNamespace(path=Path("/lib/_native.so")))
    section = device(root=tmp_path, load_torch=no_torch)
    assert section.findings == ()
    assert section.facts["native_library"] == "/lib/_native.so"
    assert section.facts["cpu_device"] == "native threads"
    monkeypatch.setattr(surroundings, "library", lambda: None)
    monkeypatch.setattr(surroundings, "why_not", lambda: "it was not built")
    section = device(root=tmp_path, load_torch=no_torch)
    assert section.facts["native_library"] is None
    assert section.facts["cpu_device"] == "threads of Python"
    (text,) = texts(section, "note")
    assert text.endswith("the native library is not in use: it was not built")


@pytest.mark.parametrize(
    ("load_torch", "words"),
    [
        (no_torch, "no torch here"),
        (lambda: fake_torch(cuda=None, devices=0), "was built without CUDA"),
        (lambda: fake_torch(cuda="13.0", devices=0), "for CUDA 13.0 sees no device"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_a_problem(tmp_path: Path, load_torch: Any, words: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    section = device(root=tmp_path, load_torch=load_torch)
    (text,) = texts(section)
    assert words in text
    assert section.facts["cuda_device"].startswith("none: torch ")


@pytest.fixture
def two_gpus(tmp_path: Path) -> Callable[[Callable[[int], Any]], Section]:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return lambda open_cuda: device(
        root=tmp_path, load_torch=lambda: fake_torch(cuda="13.0", devices=2), open_cuda=open_cuda
    )


def test_devices_are_listed_and_the_one_that_a_cache_would_take_is_named(
    two_gpus: Callable[[Callable[[int], Any]], Section],
) -> None:
    taken: list[TorchCudaDevice] = []

    def open_cuda(index: int) -> TorchCudaDevice:
        taken.append(TorchCudaDevice(index, "no CUDA driver: libcuda.so.1"))
        return taken[-1]

    section = two_gpus(open_cuda)
    assert texts(section) == []
    assert section.facts["cuda_devices"] == [
        {"name": f"GPU {i}", "total_bytes": 80 * GIB, "free_bytes": 5 * GIB} for i in range(2)
    ]
    assert section.facts["cuda_device"].startswith("TorchCudaDevice: torch ")
    assert section.facts["cuda_device"].endswith("(no CUDA driver: libcuda.so.1)")
    assert [one.closed for one in taken] == [True]


def test_a_gpu_that_cannot_be_opened_is_a_problem(two_gpus: Callable[[Callable[[int], Any]], Section]) -> None:
    def refuse(index: int) -> NoReturn:
        raise TransferError("out of memory")

    section = two_gpus(refuse)
    assert texts(section) == ["the first GPU cannot be opened: out of memory"]
    assert section.facts["cuda_device"] == "none: out of memory"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_limits_are_shown_with_their_source(tmp_path: Path) -> None:
    group = MemorySource("/sys/fs/cgroup/pod/memory.max", 32 * GIB, 20 * GIB)
    limit = MemoryLimit(32 * GIB, 20 * GIB, (*LIMIT.sources, group))
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text("2\n")
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    section = memory(limit, variables={"LOCAL_WORLD_SIZE": "2"}, reserve_gb=0, root=tmp_path)
    facts = section.facts
    assert facts["decided_by"] == group.where
    assert [source["where"] for source in facts["limits"]] == [MACHINE, group.where]
    assert (facts["ranks_per_host"], facts["ranks_from"]) == (2, "LOCAL_WORLD_SIZE")
    assert (facts["reserve_bytes"], facts["share_bytes"]) == (0, 10 * GIB)
    assert facts["huge_pages"] == "madvise"
    assert "vm.overcommit_memory is 2" in texts(section, "note")[0]


def test_huge_pages_that_are_off_are_worth_a_note(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    (text,) = texts(memory(LIMIT, variables={}, root=tmp_path), "note")
    assert text.startswith("transparent huge pages are off")


def test_no_room_is_a_problem(tmp_path: Path) -> None:
    (text,) = texts(memory(MemoryLimit(4 * GIB, GIB // 2), variables={}, root=tmp_path))
    assert text.startswith("nothing is left for a host pool")


def test_a_senseless_number_of_ranks_is_a_problem(tmp_path: Path) -> None:
    (text,) = texts(memory(LIMIT, variables={"LOCAL_WORLD_SIZE": "many"}, root=tmp_path))
    assert text.startswith("LOCAL_WORLD_SIZE=many")


# -- disks -------------------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    section = disk(tmp_path)
    assert texts(section) == []
    for name in ("free_bytes", "total_bytes", "write_bytes_s", "read_bytes_s", "fsync_s"):
        assert section.facts[name] > 0, name
    assert section.facts["filesystem"] == "ext4"
    assert list(tmp_path.iterdir()) == []


def test_without_a_probe_nothing_is_timed(tmp_path: Path) -> None:
    assert "write_bytes_s" not in disk(tmp_path, probe=False).facts


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    section = disk(tmp_path / "a" / "b")
    assert section.facts["exists"] is False
    assert section.facts["writable"] is True
    assert section.facts["write_bytes_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert texts(disk(tmp_path / "file" / "folder")) == [f"{tmp_path}/file/folder cannot be written"]


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "LOW_SPACE_BYTES", 2**62)
    (text,) = texts(disk(tmp_path))
    assert text.endswith(" left")


def test_a_slow_fsync_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "probe_disk", lambda folder, timeout_s: Probe(1e6, 1e6, 0.5))
    assert texts(disk(tmp_path), "note") == ["an fsync takes 0.50 s: a slow or busy disk"]


def test_a_disk_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, n_bytes: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disks, "_measure", fail)
    assert texts(disk(tmp_path)) == [f"the probe failed: {tmp_path}: No space left on device"]


def test_a_hung_disk_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def hang(file: Path, n_bytes: int) -> Probe:
        answer.wait()
        return Probe(1.0, 1.0, 1.0)

    monkeypatch.setattr(disks, "_measure", hang)
    with pytest.raises(BackendError, match=r"has not answered within 0.01 s"):
        probe_disk(tmp_path, timeout_s=0.01)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hicache-probe"]
    assert thread.daemon
    answer.set()
    thread.join()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_mount_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    mounts = [
        ("/", "ext4"),
        (str(tmp_path), "nfs"),
        (str(tmp_path / "data"), "xfs"),
        (str(tmp_path), "tmpfs"),
        ("/x", "y"),
    ]
    monkeypatch.setattr(
        "psutil.disk_partitions", lambda all: [SimpleNamespace(mountpoint=m, fstype=k) for m, k in mounts]
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "datastore").mkdir()
    found = {name: disk_of(tmp_path / name).filesystem for name in (".", "data", "datastore", "data/new")}
    assert found == {".": "tmpfs", "data": "xfs", "datastore": "tmpfs", "data/new": "xfs"}


# -- packages ----------------------------------------------------------------------------------------------------------


def test_packages_and_the_extras_that_bring_them() -> None:
    requirements = [
        "torch>=2.11",
        "numpy>=1.26",
        "anyio",
        'uvloop>=0.21; platform_system != "Windows" and extra == "uvloop"',
        'transformers<6,>=5.20; extra == "transformers"',
        'gguf>=0.10; extra == "transformers"',
        'pytest>=8; extra == "test"',
    ]
    present = {"torch": "2.9.1+cpu", "anyio": "4.9", "transformers": "5.24.0", "gguf": "0.9", "uvloop": "0.21.0rc1"}
    section = packages(requirements, present.get)
    assert section.facts["required"] == {"torch": "2.9.1+cpu", "numpy": None, "anyio": "4.9"}
    assert section.facts["extras"] == {
        "uvloop": {"uvloop": "0.21.0rc1"},
        "transformers": {"transformers": "5.24.0", "gguf": "0.9"},
    }
    assert section.facts["install"] == {"transformers": "pip install 'hicache-actors[transformers]'"}
    assert texts(section) == ["torch: 2.9.1+cpu is too old, >=2.11 is needed", "numpy: not installed"]


def test_the_packages_of_this_installation() -> None:
    section = packages()
    assert texts(section) == []
    assert set(section.facts["required"]) >= {"torch", "anyio", "msgspec", "psutil"}
    assert set(section.facts["extras"]) >= {"transformers", "uvloop"}


# -- the whole, with a configuration -----------------------------------------------------------------------------------


def check(file: Path | None = None, **options: Any) -> Diagnosis:
    return examine(file, **{"probe": False, "limit": LIMIT, **options})


def test_a_good_configuration(tmp_path: Path) -> None:
    found = check(write_config(tmp_path, url=f"file://{tmp_path}/store"))
    assert found.refused is None
    assert found.sizing is not None
    assert found.exit_code == 0, found.lines()
    assert {tier.tier: tier.pages for tier in found.sizing.tiers if tier.tier != "storage"} == {
        "device": 10,
        "host": 20,
    }
    assert f"disk {tmp_path}/store" in {section.name for section in found.sections}
    assert not (tmp_path / "store").exists()
    assert found.lines()[-1] == "all is well"


def test_traps_of_a_configuration_are_problems(tmp_path: Path) -> None:
    file = write_config(tmp_path, GOOD + "[host]\nratio = 1\n", url=f"file://{tmp_path}")
    found = check(file)
    assert found.exit_code == 1
    assert found.sizing is not None
    assert "host_not_larger" in {trap.code for trap in found.sizing.problems}
    assert any("storage hits have nowhere to land" in line for line in found.lines())
    assert found.lines()[-1] == "problems were found"


def test_storage_in_memory_and_a_slow_disk_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_filesystem", lambda folder: "tmpfs")
    monkeypatch.setattr(surroundings, "probe_disk", lambda folder, timeout_s: Probe(1e6, 1e6, 0.001))
    file = write_config(tmp_path, url=f"file://{tmp_path}")
    found = check(file, probe=True, prefill_tokens_per_s=1000.0)
    assert found.sizing is not None
    assert {trap.code for trap in found.sizing.problems} == {"storage_on_tmpfs", "storage_slower_than_recompute"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("page_size = 0", "page_size"),
        ("write_policy = 'later'", "write_policy"),
        ("pages_size = 1", "pages_size"),
        ("not toml", "file"),
        (GOOD + "[storage]\nurl = 'gopher://x'", "storage.url"),
        (GOOD + "[storage]\nurl = 'file:///'", "storage.url"),
        (GOOD + "[host]\nsize_gb = 1000", "host.size_gb"),
        ("[host]\nsize_gb = 1000", "host.size_gb"),
        (GOOD + "[host]\npages = 1\n[storage]\nurl = 'memory://x'", "host.pages"),
        (GOOD.replace("bfloat16", "bfloat17"), "shape.dtype"),
    ],
)
def test_what_cannot_be_honoured_is_code_2(tmp_path: Path, text: str, field: str) -> None:
    found = check(write_config(tmp_path, text))
    assert found.exit_code == 2
    assert found.refused is not None
    assert found.refused.field == field
    assert found.to_dict()["refused"]["field"] == field
    assert found.lines()[-1].startswith("the configuration cannot be honoured: ")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = check(write_config(tmp_path, url=f"file://{tmp_path}/file/store"))
    assert found.exit_code == 2
    assert found.refused is not None
    assert found.refused.field == "storage.url"


def test_ranks_share_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path, GOOD + "[host]\nsize_gb = 30\n")
    assert check(file).exit_code == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = check(file)
    assert found.refused is not None
    assert "divided among 2 ranks" in found.refused.problem


def test_without_a_shape_it_says_what_it_cannot_know(tmp_path: Path) -> None:
    found = check(write_config(tmp_path, "page_size = 32\n[host]\nsize_gb = 1\n"))
    assert found.exit_code == 0
    assert found.sizing is None
    assert any("the shape of the KV is not configured" in line for line in found.lines())
    partly = check(write_config(tmp_path, GOOD.replace("[device]\npages = 10\n", "")))
    assert partly.sizing is not None
    assert partly.sizing.tiers == ()
    assert any("device.pages is not configured" in line for line in partly.lines())


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path, GOOD + "[host]\npages = 20\nreserve_gb = 0\n")
    arguments = ["doctor", "--config", str(file), "--folder", str(tmp_path), "--no-probe"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for heading in ("environment", "device", "memory", f"disk {tmp_path}", "packages", "configuration", "sizes"):
        assert f"\n{heading}\n" in "\n" + out
    assert cli.main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 0
    assert answer["refused"] is None
    assert answer["sizing"]["tiers"]["host"]["pages"] == 20
    assert answer["sections"]["memory"]["available_bytes"] > 0
    assert answer["sections"][f"disk {tmp_path}"]["filesystem"] == "ext4"


def test_a_refusal_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path, "page_size = [1]")
    assert cli.main(["doctor", "--config", str(file), "--no-probe", "--json"]) == 2
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert (refused["field"], refused["value"]) == ("page_size", "[1]")
    assert refused["fix"]


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--prefill-tokens-per-s", "0"]) == 2
    assert "prefill_tokens_per_s" in capsys.readouterr().err


def test_by_default_it_looks_at_the_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert f"disk {tmp_path}" in {section.name for section in check().sections}


def test_torch_is_not_imported_where_there_is_no_gpu() -> None:
    code = (
        "import sys; from hicache_actors.command import surroundings, doctor; from pathlib import Path; "
        "surroundings.device(root=Path('/nowhere')); doctor.packages(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_facts_have_units_in_words() -> None:
    disk_facts = {"free_bytes": 5 * 10**9, "read_bytes_s": 1.5e9, "fsync_s": 0.0123, "exists": True, "kind": None}
    section = Section("disk", disk_facts)
    found = Diagnosis((section, Section("none", {"list": []})), None, None)
    words = [" ".join(line.split()) for line in found.lines()]
    assert words == [
        "disk", "free 5.00 GB", "read 1.50 GB/s", "fsync 12.3 ms", "exists yes", "kind -", "none", "list -", "all is well"
    ]  # fmt: skip


def test_a_refused_value_that_json_does_not_know_is_shown_as_python_writes_it() -> None:
    refused = Diagnosis((), None, ConfigError("a", {"b": 1}, "no"))
    assert refused.to_dict()["refused"]["value"] == "{'b': 1}"


# -- the store ----------------------------------------------------------------------------------------------------------


def store_section(diagnosis: Diagnosis) -> Section | None:
    return next((section for section in diagnosis.sections if section.name == "store"), None)


def stored(folder: Path, keys: KeyScheme) -> None:
    """Somebody has left an object with this name."""

    async def write() -> None:
        workers = Workers("others", 1)
        backend = FileBackend(f"file://{folder}", workers)
        await backend.open()
        await backend.write(keys.keys([b"h" * 32]), [memoryview(b"x" * 100)] * len(keys.chunks))
        await backend.close()
        workers.close()

    asyncio.run(write())


def namespace_of(**changes: Any) -> Namespace:
    facts: dict[str, Any] = {
        "model_id": "tiny", "weights": "1", "dtype": "bfloat16", "page_size": 64, "layout": "page_first_direct",
        "total_kv_heads": 3, "head_group": 3, "layer_partition": 30, "replicated": False,
    }  # fmt: skip
    return Namespace(**{**facts, **changes})


@pytest.mark.parametrize(
    ("keys", "own", "words", "severity"),
    [
        (SuffixKeys(namespace_of()), 1, "", ""),
        (SuffixKeys(namespace_of(head_group=1), Rank(tp_size=3)), 0, "suffix keys, tp=3 (1 objects)", "problem"),
        (SuffixKeys(namespace_of(model_id="other")), 0, "none of 1 names is of this model", "note"),
    ],
)
def test_the_store_is_looked_at(keys: KeyScheme, own: int, words: str, severity: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    stored(folder, keys)
    diagnosis = examine(write_config(tmp_path, url=f"file://{folder}"), folders=(tmp_path,), limit=LIMIT)
    section = store_section(diagnosis)
    assert section is not None
    assert (section.facts["listed_names"], section.facts["own_names"]) == (1, own)
    assert "tp=1" in section.facts["shared"]
    assert [(finding.severity, words in finding.text) for finding in section.findings] == (
        [(severity, True)] if words else []
    )
    assert diagnosis.exit_code == int(severity == "problem")


def test_without_a_shape_a_store_is_opened_all_the_same(tmp_path: Path) -> None:
    settings = '[model]\nmodel_id = "tiny"\nweights = "1"\n'
    found = examine(write_config(tmp_path, settings, url="redis://127.0.0.1:1"), limit=LIMIT)
    (section,) = (section for section in found.sections if section.name == "store")
    assert "it cannot be used" in section.findings[0].text
    assert found.exit_code == 1
    (tmp_path / "kv").mkdir()
    found = examine(write_config(tmp_path, settings, url=f"file://{tmp_path}/kv"), limit=LIMIT)
    (section,) = (section for section in found.sections if section.name == "store")
    assert section.facts == {"url": f"file://{tmp_path}/kv", "scope": "host", "listed_names": 0}
    assert section.findings == ()


def test_how_a_slab_moves_bytes_is_told(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    url = f"slab://{tmp_path}/kv?gb=0.02&direct=off"
    workers = Workers("doctor", 2)

    async def fill() -> None:
        backend = open_backend(url, workers)
        await backend.open()
        await backend.write(["key"], [memoryview(bytearray(70_000))])
        await backend.close()

    asyncio.run(fill())
    workers.close(10.0)
    found = examine(write_config(tmp_path, '[model]\nmodel_id = "tiny"\nweights = "1"\n', url=url), limit=LIMIT)
    section = store_section(found)
    assert section is not None
    assert section.facts["io"] == "buffered"
    assert section.facts["why_buffered"] == "direct=off"
    assert (section.facts["slot_bytes"], section.facts["listed_names"]) == (73_728, 1)
    assert section.facts["slots"] * 73_728 < section.facts["file_bytes"] <= 20_000_000


def test_the_disks_of_all_stores_of_this_host_are_looked_at(tmp_path: Path) -> None:
    layers = f"slab://{tmp_path}/near?gb=0.001 file://{tmp_path}/far redis://127.0.0.1:1"
    found = examine(write_config(tmp_path, url=layers), probe=False, limit=LIMIT)
    disks_seen = [section.facts["folder"] for section in found.sections if section.name.startswith("disk ")]
    assert disks_seen == [f"{tmp_path}/near", f"{tmp_path}/far"]
    assert found.sizing is not None
    assert found.sizing.storage is not None
    assert found.sizing.storage.room_bytes is None  # of layers


def test_a_store_whose_slots_are_too_short_is_a_problem(tmp_path: Path) -> None:
    url = f"slab://{tmp_path}/slab?gb=0.01"

    async def store(object_bytes: int) -> None:
        workers = Workers("slab", 2)
        backend = open_backend(url, workers)
        await backend.open()
        await backend.write([f"{'ab' * 32}_other"], [memoryview(bytes(object_bytes))])
        await backend.close()
        workers.close()

    asyncio.run(store(8192))
    found = examine(write_config(tmp_path, url=url), limit=LIMIT)
    (section,) = (section for section in found.sections if section.name == "store")
    assert section.findings[0].severity == "problem"
    assert "this store takes 8,192 at most: nothing can be stored" in section.findings[0].text
    assert found.exit_code == 1
    (tmp_path / "slab" / "objects.slab").unlink()
    asyncio.run(store(2 * 2**20))
    (section,) = (one for one in examine(write_config(tmp_path, url=url), limit=LIMIT).sections if one.name == "store")
    assert "at most" not in str(section.findings)


@pytest.mark.parametrize(
    ("value", "words"), [("1", "every cache is switched off"), ("off", "neither on nor off: no cache opens")]
)
def test_the_kill_switch_is_a_problem(value: str, words: str) -> None:
    (finding,) = (one for one in environment({DISABLED_VARIABLE: value}).findings if DISABLED_VARIABLE in one.text)
    assert (finding.severity, words in finding.text) == ("problem", True)
    assert not [one for one in environment({DISABLED_VARIABLE: "0"}).findings if DISABLED_VARIABLE in one.text]


def test_switches_of_a_configuration_are_named(tmp_path: Path) -> None:
    for line, words in (("enabled = false", "keeps nothing"), ("shadow = true", "served to nobody")):
        found = examine(write_config(tmp_path, f"{line}\n{GOOD}"), limit=LIMIT)
        (section,) = (section for section in found.sections if section.name == "configuration")
        assert words in section.findings[0].text


def test_a_store_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    diagnosis = examine(write_config(tmp_path, url=f"file://{tmp_path}/none"), folders=(tmp_path,), limit=LIMIT)
    assert store_section(diagnosis) is None
    assert not (tmp_path / "none").exists()


def test_a_store_that_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "store" / "usage").mkdir(parents=True)  # where its ledger would be
    diagnosis = examine(write_config(tmp_path, url=f"file://{tmp_path}/store"), folders=(tmp_path,), limit=LIMIT)
    section = store_section(diagnosis)
    assert section is not None
    assert "cannot be used" in section.findings[0].text
    assert diagnosis.exit_code == 1


def test_unified_settings_that_do_not_fit_are_refused_by_the_doctor(tmp_path: Path) -> None:
    text = GOOD + '[host]\nlayout = "page_unified"\n[storage]\nkeys = "unified"\ntp_lcm_size = 2\nurl = "memory://"\n'
    diagnosis = examine(write_config(tmp_path, text), folders=(tmp_path,), limit=LIMIT)
    assert diagnosis.refused is not None
    assert diagnosis.refused.field == "storage.tp_lcm_size"
