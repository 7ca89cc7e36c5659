"""hicache_actors: an asyncio-native actor framework for tiered LLM KV caches."""
