"""Two sensors: one whose ticks fail, and one whose ticks succeed. No Kafka."""

import dagster as dg


@dg.op
def return_at_once() -> None:
    """Do nothing."""


@dg.job
def quick() -> None:
    """A run of a sensor."""
    return_at_once()


@dg.sensor(job=quick, minimum_interval_seconds=1)
def failing_sensor() -> dg.SkipReason:
    """Fail, as a tick that cannot read a setting."""
    msg = "KAFKA_BROKERS is not set"
    raise KeyError(msg)


@dg.sensor(job=quick, minimum_interval_seconds=1)
def skipping_sensor() -> dg.SkipReason:
    """Skip."""
    return dg.SkipReason("nothing to do")


defs = dg.Definitions(jobs=[quick], sensors=[failing_sensor, skipping_sensor])
