"""Benchmarks behind `hicache bench`: a suite (see `suites`) is one or more modules here; names of figures end in their unit."""
