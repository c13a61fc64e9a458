"""Store policies: which device blocks are stored, and when."""
