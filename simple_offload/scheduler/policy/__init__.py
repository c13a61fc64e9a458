"""The store policy: which device blocks are stored, and when."""
