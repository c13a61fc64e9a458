"""vLLM with several KV connectors, one after another, on the same work.

``python -m examples.engine_bench`` starts one engine a contender, in turn and several times,
and shows medians and ratios: absolute times hold on one machine and on one day only.
"""
