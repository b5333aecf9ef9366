"""What came of a measurement, as pure data: ``Settings`` are what was asked, a ``Result`` is what was found.

Nothing here measures, compares, prints or imports jax. ``verdict.py`` and ``layers.py`` say whether activations
dominate; ``records.py`` turns records into JSON and back.
"""
