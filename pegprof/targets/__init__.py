"""Reading compiled programs: the text of an optimised HLO module in, a price for each of its operations out.

``chips.py`` has the figures of each accelerator. ``hlo.py`` parses ``compiled.as_text()``. ``flops.py`` and
``traffic.py`` count what an operation does and what it moves; ``compiler_prices.py`` reads what the compiler says that
it takes. ``estimate.py`` puts them together: ``estimate(text, chip) -> Estimate``. Nothing here imports jax.
"""
