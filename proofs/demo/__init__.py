"""In `python -m proofs demo` two members hand partitions over while Spark runs drain.

The demo then checks the output.
"""
