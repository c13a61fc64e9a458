"""The host tier: which host block holds what, and what leaves first."""
