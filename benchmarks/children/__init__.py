"""Programs that benchmarks start as processes of their own."""
