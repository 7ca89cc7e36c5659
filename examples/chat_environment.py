"""The environment that the chats want.  Torch and transformers read it when they are imported, so this is imported before them."""

from __future__ import annotations

import os

import smollm2

# OpenMP's threads spin while they wait.  With anything else running a forward pass then takes ten times as long.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "0")
os.environ.update(smollm2.QUIET)
