"""Ticks of sensors: which ones are real, where they are, and how many runs one may request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg


MOST_REQUESTS_PER_TICK = 20
"""A run request costs Dagster's daemon 0.2 to 0.3 s, in which no other sensor is evaluated."""


def is_real_tick(context: dg.SensorEvaluationContext) -> bool:
    """Whether Dagster's daemon evaluates the sensor.

    "Preview tick result" runs the same function and must touch nothing.
    """
    return bool(context.log_key and context.log_key[-1].isdigit())


def location_of(context: dg.SensorEvaluationContext) -> str:
    """The code location of a sensor."""
    origin = context.code_location_origin
    return origin.location_name if origin else "unknown"
