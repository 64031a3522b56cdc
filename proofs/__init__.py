"""Proofs of what the package promises: on real parts (demo, chaos), in virtual time (simulation), and in figures (bench).

They are no part of the wheel, and run from a checkout: `python -m proofs --help`.
"""
