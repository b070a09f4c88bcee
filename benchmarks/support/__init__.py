"""What benchmarks share: timing and results, shapes, random models, workloads, baselines. No claims, and no main."""
