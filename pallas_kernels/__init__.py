"""Kernels: one folder per operation, each with an ``api`` and a ``reference`` that is always right.

Backends stand beside the reference, one file each. A backend that cannot serve its arguments refuses with a reason, and
the next one is tried. Nothing here knows the rest of the project.
"""

__all__: list[str] = []
