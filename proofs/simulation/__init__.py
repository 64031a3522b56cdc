"""The simulator runs the real member against simulated parts, in virtual time.

The real member is the member loop, the consumer lists and the engine; the simulated parts are
coordinators, Dagster and processes. A schedule is one thread, seeded, without real parts:
`schedule.play` plays one life of a group and checks what is promised after each step. `proof.prove`
plays many schedules, on all cores. A schedule is its seed: the same seed gives the same trace,
whoever plays it.
"""
