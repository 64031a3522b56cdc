"""The package as users get it: built, and installed into environments that have nothing else."""
