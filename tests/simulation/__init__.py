"""A deterministic simulator of one vLLM engine with a host tier.

It runs vLLM's real scheduler, this project's real scheduler and worker sides, and one worker for
each rank. A scripted device replaces the model. It writes the identity of the tokens into each KV
page, and checks every page that attention would read. A seed determines time, order, faults and
arrivals.
"""
