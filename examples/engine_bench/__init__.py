"""vLLM with several KV connectors, one after another and several times, on the same work: medians
and ratios, since absolute times hold on one machine and on one day only."""
