"""The surgery: statistics of per-example gradients. Knows nothing of files, terminals or clocks."""
