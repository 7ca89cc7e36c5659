"""SGLang has an environment of its own: where it is not, its tests cannot even be collected (and asking for them fails)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("sglang") else ["test_sglang.py"]
