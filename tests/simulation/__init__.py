"""A deterministic simulator of one vLLM engine with a host tier.

vLLM's real scheduler, this project's real scheduler and worker sides, one worker for each
rank, and a scripted device in place of a model: it writes into each KV page who it is, and
checks every page that attention would read. Time, order, faults and arrivals come from a seed.
"""
