"""Agents benchmark: recorded agents, over HTTP, for one KV connector after another.
``python -m examples.agent_bench`` (or ``make bench-agents``); see its ``--help``.
"""
