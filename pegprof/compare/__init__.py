"""Results in, what changed between them and whether the limits allow it out.

``comparison.py`` lists changes, ``significance.py`` says whether a time has changed, ``limits.py`` reads what is
allowed, ``gate.py`` puts them together.
"""
