"""`python -m proofs chaos`: inject random faults into real processes; count losses and stalls."""
