"""Jaxpr-to-Jaxpr passes. Each computes what it is given, so each is tested by evaluating before and after."""
