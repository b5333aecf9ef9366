"""Where programs would run: a name such as ``tpu-v5p:4x4x4`` in, a ``Target`` with its device, compiler and mesh out.

``devices.py`` and ``chips.py`` are the tables, ``selection.py`` chooses from them, ``meshes.py`` arranges devices,
``cache.py`` keeps what compilers answered, ``hlo/`` reads compiled programs. Nothing here starts a JAX backend.
"""
