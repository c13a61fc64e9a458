"""The command ``simple-offload``: doctor and bench. Imports neither torch nor vLLM."""
