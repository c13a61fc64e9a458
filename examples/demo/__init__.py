"""Conversations that outgrow the device's KV space, without and with the host tier: turn by turn,
the sources of each prompt's KV, and the time to its first token."""
