"""Serving benchmark: the same work for vLLM with one KV connector after another, in process or over
HTTP. ``python -m examples.serve_bench`` (or ``make bench-serve``); see its ``--help``.
"""
