"""How much host memory: what caches of other sizes would find."""
