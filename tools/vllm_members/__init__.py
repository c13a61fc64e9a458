"""The members of vLLM that this project uses, in any version of vLLM."""
