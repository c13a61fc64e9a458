"""The demo: a conversation with and without the connector. ``python -m examples.demo``."""
