"""The forecast of a hold: by what the last batches took, and silent where nobody can know."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.revokes.hold import Forecast


@pytest.mark.parametrize(
    ("took_s", "claimed_at", "said"),
    [
        ((), [90.0], ""),
        ((30.0, 30.0), [90.0], ""),
        ((30.0, 40.0, 20.0), [], ""),
        ((30.0, 40.0, 20.0), [90.0], "likely for 20 s more (batches took 30 s)"),
        ((30.0, 40.0, 20.0), [75.0, 90.0], "likely for 20 s more (batches took 30 s)"),
        ((30.0, 40.0, 20.0), [70.0], "already longer than usual (batches took 30 s)"),
        ((0.1, 0.2, 0.9), [90.0], ""),
    ],
)
def test_a_forecast_goes_by_the_usual_time_of_a_batch(
    took_s: tuple[float, ...], claimed_at: list[float], said: str
) -> None:
    """The youngest batch ends last. Two batches, or tenths of a second, say nothing."""
    assert Forecast(took_s).remaining(claimed_at, 100.0) == said


def test_only_the_last_batches_count() -> None:
    """A team mends what was slow."""
    forecast = Forecast()
    for took_s in [*range(100, 200), *([5] * 10)]:
        forecast = forecast.with_duration(took_s)
    assert forecast.durations_s == (5,) * 10
