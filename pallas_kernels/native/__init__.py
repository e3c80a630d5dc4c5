"""C++ kernels for the CPU, registered with XLA: the ``cpu`` backends of the operations in this package.

The sources in ``src`` are compiled when the package is installed, once per instruction set, and the best one that the
CPU runs is picked when they are loaded. Without a compiler there is no library, and operations fall back to XLA.
"""

from pallas_kernels.native.library import load, missing, use_kernels

__all__ = ["load", "missing", "use_kernels"]
