"""What the benchmarks and the demo share: arguments, processes, contenders, results, reports."""
