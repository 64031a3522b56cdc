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
def test_forecast_uses_the_median_duration(
    took_s: tuple[float, ...], claimed_at: list[float], said: str
) -> None:
    assert Forecast(took_s).remaining(claimed_at, 100.0) == said


def test_forecast_keeps_the_last_durations() -> None:
    forecast = Forecast()
    for took_s in [*range(100, 200), *([5] * 10)]:
        forecast = forecast.with_duration(took_s)
    assert forecast.durations_s == (5,) * 10
