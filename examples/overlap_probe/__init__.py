"""What it would bring to compute first layers while the KV of the others is still on its way."""
