"""Micro-benchmarks behind `hicache bench`: each module has ``run() -> dict`` of figures whose names end in their unit."""
