"""Who owns which block, and when. Runs in the scheduler process; knows nothing of torch."""
