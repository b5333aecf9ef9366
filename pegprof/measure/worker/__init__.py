"""What runs in child processes, the only part of the measuring that imports jax: a request in, an answer out.

``main.py`` reads requests. ``compiling.py`` answers those that run nothing, ``running.py`` the others. ``methods.py``
is the table of methods, ``programs.py`` makes whole programs of them, ``place.py`` compiles for devices and meshes.
"""
