"""Random small losses, held against a loop over the examples: ``python -m tests.fuzz --seconds 60``."""
