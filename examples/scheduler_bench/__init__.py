"""The cost of a KV connector in vLLM's scheduler, and what requests find: ours beside vLLM's own.

``python -m examples.scheduler_bench`` runs vLLM's own scheduler, without an engine or a model, with
one connector after another: time in the connector's hooks, memory and start-up time of a large
host tier, and what a chat, recorded requests and agents find and wait for.
"""
