"""Programs that verify the promises of the package: `python -m proofs --help`.

`demo` and `chaos` run on real processes, `simulation` in virtual time, and `bench` measures. They
run from a checkout only.
"""
