"""Compiles for NVIDIA GPUs without having one, and reads what came out.

XLA's GPU compiler needs a description of a chip, not the chip. ``toolchain`` says where its wheels are, ``targets``
describes chips, ``cases`` says what is compiled, ``worker`` compiles in a process of its own, ``resources`` and
``program`` read kernels and whole programs, and ``run`` starts workers and collects their reports.
"""

__all__: list[str] = []
