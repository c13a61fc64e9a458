"""Multi-turn serving benchmark: the same conversations, over HTTP, for one KV connector after
another. ``python -m examples.multi_turn`` (or ``make bench-turns``); see its ``--help``.
"""
