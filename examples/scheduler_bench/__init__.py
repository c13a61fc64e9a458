"""vLLM's scheduler with each connector, without engine or model. ``python -m
examples.scheduler_bench`` (or ``make bench-scheduler``); see its ``--help``."""
