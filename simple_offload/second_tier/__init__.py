"""The second tier: objects behind host memory, kept by vLLM's own tier managers."""
