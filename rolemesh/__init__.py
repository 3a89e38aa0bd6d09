"""Rolemesh, the library: what every role shares. Start with roles.py. Only __main__.py imports services/."""

import os

# A row's bits must not depend on the rows beside it, nor on the number of threads. MKL reads this at the
# process's first matrix product; without it, matrices of few rows take other kernels or cut sums in pieces.
# It costs a few per cent of time at most.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
