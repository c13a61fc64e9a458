"""Conversations that outgrow the device's KV space, without and with the host tier.

``python -m examples.demo`` runs the same conversations twice on real vLLM and shows, turn by
turn, where the KV of each prompt came from and how long its first token took.
"""
