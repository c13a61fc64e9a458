"""How bytes move: one CopyBackend for each kind of device."""
