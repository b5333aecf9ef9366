"""What to measure: a name or a user's objects in, a checked ``Problem`` out.

``problem.py`` has the record and finds it by name, ``own_models.py`` reads users' files and packages, ``adapters.py``
makes Problems of flax modules, ``check_problem.py`` and ``check_examples.py`` say what is wrong with one.
"""
