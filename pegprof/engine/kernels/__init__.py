"""Fused kernels: products of all examples in, summaries of their gradients out, on TPUs and NVIDIA GPUs.

A kernel forms a tile of one example's gradient after the other and adds it to accumulators that stay on chip, so no
gradient of an example travels to memory. ``rules/fused.py`` uses them; ``switch.py`` says whether they may be used.

    base.py    shapes and costs          tpu.py    Pallas for Mosaic          gpu.py    Pallas for Triton
    layout.py  a contraction as the kernels take it          selfcheck.py    one tile against the plain product
"""
