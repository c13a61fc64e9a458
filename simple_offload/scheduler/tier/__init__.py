"""The host tier: the contents of host blocks, and their order of eviction."""
