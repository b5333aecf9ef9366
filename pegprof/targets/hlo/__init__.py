"""Reading compiled programs: the text of an optimised HLO module in, a price for each of its operations out.

``module.py`` parses ``compiled.as_text()``. ``flops.py`` and ``traffic.py`` count what an operation does and what it
moves; ``compiler_prices.py`` reads what the compiler says that it takes; ``estimate.py`` puts them together.
``collectives.py`` lists what devices send to each other. Nothing here imports jax.
"""
