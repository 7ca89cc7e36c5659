"""The `hicache` command: what an operator asks before and while a cache runs."""
