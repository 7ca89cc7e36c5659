"""Storage engines, each against its real server: ``make test-engines``."""
