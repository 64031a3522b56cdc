"""The simulator: the real member (pump, consumer lists, driver) against simulated coordinators, Dagster and processes, in virtual time.

A schedule is one thread, seeded, without real parts: `schedule.play` plays one life of a group and checks what is promised after each step.
`proof.prove` plays many, on all cores. A schedule is its seed: the same seed gives the same trace, whoever plays it.
"""
