"""The command ``simple-offload``: doctor, plan and bench. Imports neither torch nor vLLM."""
