"""When bytes move. Runs in every worker process, one per rank."""
