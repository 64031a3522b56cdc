"""These programs prove what the package promises.

`demo` and `chaos` run on real parts, `simulation` runs in virtual time, and `bench` measures
figures. They are no part of the wheel, and run from a checkout: `python -m proofs --help`.
"""
