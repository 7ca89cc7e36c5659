"""New files where the system cannot make one without a name, or not name it: a library between us and the system says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from .toolchain import call, gxx

pytestmark = pytest.mark.native

SHIM = r"""
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static bool refused(const char *what) { const char *said = getenv("REFUSED"); return said && strstr(said, what); }
extern "C" int openat(int folder, const char *path, int flags, ...) {
  va_list rest; va_start(rest, flags); const mode_t mode = va_arg(rest, int); va_end(rest);
  if ((flags & O_TMPFILE) == O_TMPFILE && refused("open")) return errno = EOPNOTSUPP, -1;
  return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat"))(folder, path, flags, mode);
}
extern "C" int linkat(int from, const char *source, int to, const char *path, int flags) {
  if (refused(flags & AT_EMPTY_PATH ? "descriptor" : "proc")) return errno = ENOENT, -1;
  return ((int (*)(int, const char *, int, const char *, int))dlsym(RTLD_NEXT, "linkat"))(from, source, to, path, flags);
}
"""

WRITES = """
import os, sys
from hicache_actors.cuda_ext.native import files as native
library, folder = native.files(), sys.argv[1]
assert library is not None
for number, count in enumerate((3, 12, 3)):  # the second knows what the first has met, and opens the folder for all of its files
    names = [b"%s/%d-%d" % (folder.encode(), number, at) for at in range(count)]
    with open(names[1], "wb") as file:
        file.write(b"in the way")
    writes = native.Writes(library, names, [memoryview(b"whole" * 99)] * count, b".w%d." % number, 10)
    writes.run()
    outcomes = [native.WRITE_WRITTEN] * count
    outcomes[1] = native.WRITE_EXISTS
    assert writes.outcomes == outcomes, writes.outcomes
    assert [os.path.getsize(name) for name in names] == [495, 10, *[495] * (count - 2)]
    beside = os.path.join(folder.encode(), b".w%d.11.tmp" % number)
    assert os.path.getsize(beside) == 495
    assert {os.stat(name).st_mode & 0o777 for name in (names[0], beside, names[2])} == {0o600}
    gone = native.Writes(library, [b"/no/such/f"], [memoryview(b"whole")], b".", 0)
    gone.run()
    assert gone.outcomes == [native.WRITE_NO_FOLDER]
assert len(os.listdir(folder)) == 18 + 3
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    source, built = folder / "shim.cpp", folder / "shim.so"
    source.write_text(SHIM)
    call([gxx(), "-D_GNU_SOURCE", "-shared", "-fPIC", "-w", source, "-o", built, "-ldl"])
    return built


@pytest.mark.parametrize("refused", ["", "open", "descriptor", "descriptor proc"])
def test_files_are_made_whole_whatever_the_system_refuses(refused: str, shim: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(shim), "REFUSED": refused}
    call([sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", WRITES, tmp_path], env=environment)
