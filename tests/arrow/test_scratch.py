"""Outputs from Arrow that are redirected: the real output is read at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance import IllegalStateError, redirect_outputs
from tests.arrow.given import records, span, with_time
from tests.arrow.sinks import KINDS, READERS, WRITERS, place_of

if TYPE_CHECKING:
    from pathlib import Path

FORMS = {
    "parquet": "Parquet",
    "delta": "Delta Lake",
    "iceberg": "Iceberg",
    "postgres": "Postgres",
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return place_of(kind, tmp_path, lambda: request.getfixturevalue("postgres"))


def test_redirected_write_leaves_the_output_as_it_was(
    kind: str, place: str, tmp_path: Path
) -> None:
    write, read = WRITERS[kind], READERS[kind]
    first, second = span(0, 3), span(3, 10)
    write(records(first), place, [first])
    before = sorted(map(str, read(place).to_pylist()))
    with redirect_outputs(str(tmp_path / "scratch")) as scratch:
        write(records(first, "b"), place, [first])
        write(records(second, "c"), place, [second])
    assert sorted(map(str, read(place).to_pylist())) == before
    (made,) = scratch.outputs
    assert (made.form, made.rows, len(made.shown)) == (FORMS[kind], 10, 5)
    assert {row["value"] for row in made.shown} <= {"b", "c"}
    assert bool(made.place) == (kind != "postgres")
    write(records(second, "d"), place, [second])
    assert read(place).num_rows == 10


def test_records_that_do_not_fit_the_output_are_refused(
    kind: str, place: str, tmp_path: Path
) -> None:
    write, range_ = WRITERS[kind], span(0, 3)
    write(records(range_), place, [range_])
    with (
        redirect_outputs(str(tmp_path / "scratch")) as scratch,
        pytest.raises(IllegalStateError, match="at"),
    ):
        write(with_time(records(range_)), place, [range_])
    assert scratch.outputs == []


def test_output_that_does_not_exist_is_not_created(kind: str, tmp_path: Path) -> None:
    if kind == "postgres":
        pytest.skip("a table of Postgres must exist")
    (tmp_path / "real").mkdir()
    place = place_of(kind, tmp_path / "real", lambda: pytest.fail("no Postgres"))
    with redirect_outputs(str(tmp_path / "scratch")) as scratch:
        WRITERS[kind](records(span(0, 2)), place, [span(0, 2)])
    assert [made.rows for made in scratch.outputs] == [2]
    assert not [path for path in (tmp_path / "real").rglob("*") if path.suffix == ".parquet"]


def test_second_redirection_is_refused(tmp_path: Path) -> None:
    with (
        redirect_outputs(str(tmp_path)),
        pytest.raises(IllegalStateError, match="already: end that redirection"),
        redirect_outputs(str(tmp_path)),
    ):
        pass
    with redirect_outputs(str(tmp_path)):
        pass
