"""The cost of a KV connector in vLLM's scheduler, and its hit rates: ours beside the built-in one.

``python -m examples.scheduler_bench`` runs vLLM's own scheduler, without an engine or a model, with
one connector after another: time in the connector's hooks, memory and start-up time of a large
host tier, and hit rates of conversations over tiers that are too small for them.
"""
