"""The simulator runs the real member loop, consumer lists and engine in virtual time.

Coordinators, Dagster and processes are simulated. A schedule is one thread with a seed: the same
seed gives the same trace. `schedule.play` plays one schedule and checks the promises after each
step. `proof.prove` plays many on all cores.
"""
