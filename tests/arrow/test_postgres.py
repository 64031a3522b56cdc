"""Postgres tables from Arrow: kept rows, other names of a table, and the values of columns."""

from __future__ import annotations

import json
import threading
from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import Message

from dagster_rebalance import ConfigurationError, IllegalStateError, KafkaBatch
from dagster_rebalance.arrow.output import write_postgres
from dagster_rebalance.testing.deadline import wait_until
from tests.arrow.given import expected, records, span
from tests.arrow.sinks import POSTGRES_TABLE, place_of, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster_rebalance.testing.postgres import Postgres

pytestmark = pytest.mark.postgres

LIMIT_S = 120.0
RANGES = [span(0, 5)]
KEEP = (
    "CREATE FUNCTION shop.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
    "CREATE TRIGGER keep BEFORE {} ON shop.orders FOR EACH ROW EXECUTE FUNCTION shop.keep()"
)
POLICY = (
    "CREATE POLICY tenants ON shop.orders USING (tenant = current_user); "
    "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY"
)


@pytest.fixture(scope="module")
def database(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> str:
    return place_of("postgres", tmp_path_factory.getbasetemp(), lambda: postgres)


@pytest.fixture
def place(database: str) -> str:
    """A database with an empty table shop.orders."""
    execute(database, f"DROP SCHEMA shop CASCADE; {POSTGRES_TABLE}")
    return database


def execute(place: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(place) as database:
        found = database.execute(statement)
        return found.fetchall() if found.description else []


def write(place: str, value: Any = "a", table: str = "shop.orders", **columns: Any) -> None:  # noqa: ANN401
    given = records(RANGES, value)
    for name, column in columns.items():
        given = given.append_column(name, column)
    write_postgres(given, table, RANGES, connection=place)


def write_column(place: str, column: str, values: Sequence[Any], type_: Any = None) -> list[Any]:  # noqa: ANN401
    """Write values to a new column, and return them as Postgres has them."""
    execute(place, f"ALTER TABLE shop.orders ADD COLUMN u {column}")
    write(place, u=pa.array([*values, *[None] * (5 - len(values))], type_))
    found = execute(place, 'SELECT u FROM shop.orders ORDER BY "offset"')
    return [value for (value,) in found[: len(values)]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (KEEP.format("DELETE"), "kept rows of the ranges after their DELETE"),
        (
            "CREATE RULE keep AS ON DELETE TO shop.orders DO INSTEAD NOTHING",
            "kept rows of the ranges after their DELETE",
        ),
        (KEEP.format("INSERT"), "did not have the rows of the records"),
        (
            "CREATE RULE drop AS ON INSERT TO shop.orders DO INSTEAD NOTHING",
            "did not have the rows of the records",
        ),
    ],
    ids=["trigger", "rule", "trigger of insert", "rule of insert"],
)
def test_table_that_keeps_or_drops_rows_is_refused(place: str, change: str, reason: str) -> None:
    write(place)
    execute(place, change)
    with pytest.raises(ConfigurationError, match=f"{reason}.*Nothing was written"):
        write(place, "b")
    assert rows("postgres", place) == expected((0, 5, "a"))


def test_table_with_a_policy_of_its_writers_is_refused(place: str) -> None:
    execute(
        place,
        "ALTER TABLE shop.orders ADD COLUMN tenant text DEFAULT current_user; DO $$ BEGIN IF NOT "
        "EXISTS (SELECT FROM pg_roles WHERE rolname = 'tenant') THEN CREATE ROLE tenant LOGIN; END "
        f"IF; END $$; {POLICY}; GRANT USAGE ON SCHEMA shop TO tenant; GRANT ALL ON shop.orders TO "
        "tenant",
    )
    write(place)  # the owner
    with pytest.raises(ConfigurationError, match=r"row security of shop\.orders applies"):
        write(place.replace("dagster@", "tenant@"), "b")
    assert rows("postgres", place) == expected((0, 5, "a"))


def test_partition_and_its_table_take_turns(place: str) -> None:
    execute(
        place,
        "CREATE TABLE shop.parted (LIKE shop.orders) PARTITION BY LIST (partition); CREATE TABLE "
        "shop.part PARTITION OF shop.parted FOR VALUES IN (0)",
    )
    lock, oid = "pg_advisory_lock(hashtextextended(%s, 0))", "SELECT 'shop.parted'::regclass::oid"
    with psycopg.connect(place) as database:
        database.execute(f"SELECT {lock}", [f"{execute(place, oid)[0][0]} orders-0"])
        writer = threading.Thread(target=write, args=(place, "a", "shop.part"))
        writer.start()
        wait_until(lambda: waiting(place), timeout_s=LIMIT_S, what="a writer")
    writer.join(LIMIT_S)
    assert execute(place, "SELECT count(*) FROM shop.parted") == [(5,)]


def waiting(place: str) -> bool:
    """Whether a writer waits for its turn."""
    locks = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    return bool(execute(place, locks))


@pytest.mark.parametrize(
    "other",
    [
        "CREATE VIEW shop.other AS SELECT * FROM shop.orders",
        "CREATE TABLE shop.other () INHERITS (shop.orders)",
    ],
    ids=["view", "child"],
)
def test_other_name_of_the_rows_of_a_table_is_refused(place: str, other: str) -> None:
    execute(place, other)
    with pytest.raises(ConfigurationError, match=r"shop.other is a view.*give the name"):
        write(place, table="shop.other")


def test_table_that_is_replaced_before_its_lock_is_not_written(place: str) -> None:
    execute(place, "CREATE TABLE shop.new (LIKE shop.orders)")
    failed: list[Exception] = []

    def work() -> None:
        try:
            write(place)
        except ConfigurationError as error:
            failed.append(error)

    with psycopg.connect(place) as database:
        oid = execute(place, "SELECT 'shop.orders'::regclass::oid")[0][0]
        database.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [f"{oid} orders-0"])
        writer = threading.Thread(target=work)
        writer.start()
        wait_until(lambda: waiting(place), timeout_s=LIMIT_S, what="a writer")
        execute(
            place,
            "ALTER TABLE shop.orders RENAME TO old; ALTER TABLE shop.new RENAME TO orders",
        )
    writer.join(LIMIT_S)
    assert "was replaced by another table" in str(failed[0])
    assert execute(place, "SELECT 1 FROM shop.orders") == []


@pytest.mark.parametrize("name", ["dagster_rebalance_staged", "r"])
def test_table_with_a_name_of_the_statements_is_written(place: str, name: str) -> None:
    execute(place, f"DROP TABLE IF EXISTS public.{name}")
    execute(place, f"CREATE TABLE public.{name} (LIKE shop.orders, a text, c int)")
    for value in "ab":
        write(place, value, table=name)
    assert [row[2:4] for row in execute(place, f"TABLE public.{name}")] == [
        (n, "b") for n in range(5)
    ]


def test_missing_table_and_column_are_answered_with_their_definition(place: str) -> None:
    batch = KafkaBatch.for_testing(
        RANGES,
        messages=[
            Message(
                topic="orders",
                partition=0,
                offset=3,
                value=b"v",
                headers=[("h", b"\xff\x00"), ("h", None)],
                timestamp=(1, 7),
            )
        ],
    )
    with pytest.raises(ConfigurationError) as missing:
        write_postgres(batch.arrow(), "shop.Raw", RANGES, connection=place)
    execute(place, str(missing.value).split("): ", 1)[1])
    for _ in range(2):
        write_postgres(batch.arrow(), "shop.Raw", RANGES, connection=place)
    ((offset, timestamp, headers),) = execute(
        place, 'SELECT "offset", timestamp, headers FROM shop."Raw"'
    )
    assert (offset, timestamp) == (3, datetime.fromtimestamp(0.007, timezone.utc))
    assert headers == [{"key": "h", "value": "/wA="}, {"key": "h", "value": None}]
    with pytest.raises(IllegalStateError, match=r'add "u" numeric\(5,2\) to the table'):
        write(place, u=pa.array([Decimal("1.23")] * 5, pa.decimal128(5, 2)))


@pytest.mark.parametrize(
    ("column", "value", "type_", "remedy"),
    [
        (
            "numeric(10,2)",
            Decimal("1.239"),
            pa.decimal128(10, 3),
            r"cast it to decimal128\(10, 2\) or alter .* to numeric\(10,3\)",
        ),
        ("numeric(10,2)", 5, pa.int32(), r"cast it to decimal128\(10, 2\) or .* integer"),
        ("real", 0.123456789012, pa.float64(), "cast it to float or .* double precision"),
        ("double precision", 2**53 + 1, pa.int64(), "cast it to double or .* bigint"),
        ("integer", 1, pa.int64(), "cast it to int32 or .* bigint"),
        ("timestamptz", 0, pa.timestamp("us"), r"cast it to timestamp\[us, tz=UTC\] or .*without"),
        ("timestamp", 0, pa.timestamp("us", "Asia/Tokyo"), r"cast it to timestamp\[us\] or .*with"),
        ("timestamptz(3)", 1, pa.timestamp("us", "UTC"), "alter the column"),
        ("time", 1001, pa.time64("ns"), r"cast it to time64\[us\]"),
        ("text", b"hello", pa.binary(), "cast it to string or .* bytea"),
        ("bytea", "\\x41", pa.string(), "cast it to binary or .* text"),
        ("integer[]", [1], pa.list_(pa.int32()), "alter .* to jsonb"),
        ("interval", 1, pa.duration("s"), "cast it to string"),
        ("shop.cents", Decimal("1.239"), pa.decimal128(10, 3), r"decimal128\(10, 2\)"),
    ],
)  # fmt: skip
def test_type_whose_values_the_column_would_change_is_refused(
    place: str,
    column: str,
    value: object,
    type_: Any,  # noqa: ANN401
    remedy: str,
) -> None:
    execute(place, "CREATE DOMAIN shop.cents AS numeric(10,2)")
    with pytest.raises(IllegalStateError, match=f"column 'u' is .*: .*{remedy}"):
        write_column(place, column, [value], type_)
    assert execute(place, "SELECT 1 FROM shop.orders") == []


@pytest.mark.parametrize(
    ("column", "value", "type_"),
    [
        ("numeric(12,3)", Decimal("1.239"), pa.decimal128(10, 3)),
        ("numeric", Decimal(2**64 - 1), pa.uint64()),
        ("bigint", -5, pa.int8()),
        ("double precision", 0.1, pa.float64()),
        ("real", 1.5, pa.float16()),
        ("boolean", True, pa.bool_()),
        ("date", date(2020, 1, 2), pa.date32()),
        ("time", time(0, 0, 1), pa.time32("s")),
        (
            "timestamptz",
            datetime(1970, 1, 2, tzinfo=timezone.utc),
            pa.timestamp("ns", "Asia/Tokyo"),
        ),
        ("timestamp", datetime(1970, 1, 2, 3), pa.timestamp("s")),  # noqa: DTZ001
        ("bytea", b"\x00\xff", pa.large_binary()),
        ("bytea", b"abcd", pa.binary(4)),
        ("varchar(3)", "abc", pa.string()),
        ("char(3)", "abc", pa.dictionary(pa.int8(), pa.string())),
        ("uuid", UUID(int=5), pa.uuid()),
        ("text", None, pa.null()),
        ("jsonb", {"a": 1, "b": None}, pa.map_(pa.string(), pa.int32())),
        ("json", [{"m": {"k": [1, None]}}], None),
    ],
)
def test_value_is_stored_as_it_is(place: str, column: str, value: Any, type_: Any) -> None:  # noqa: ANN401
    assert write_column(place, column, [None, value, value], type_) == [None, value, value]


def test_map_with_a_repeated_key_keeps_both_values(place: str) -> None:
    pairs = [("a", 1), ("a", 2)]
    found = write_column(place, "jsonb", [pairs], pa.map_(pa.string(), pa.int32()))
    assert found == [[["a", 1], ["a", 2]]]


def test_database_type_takes_text(place: str) -> None:
    execute(place, "CREATE TYPE shop.mood AS ENUM ('fine')")
    assert write_column(place, "shop.mood", ["fine"]) == ["fine"]


@pytest.mark.parametrize("microseconds", [10**18 * 17 // 10, -62_135_596_800_000_001, -(10**17)])
def test_time_that_python_does_not_have_is_stored(place: str, microseconds: int) -> None:
    execute(
        place,
        "ALTER TABLE shop.orders ADD COLUMN at timestamptz, ADD COLUMN day date, ADD COLUMN parts "
        "jsonb",
    )
    at = pa.array([0, microseconds, None, 1, 2], pa.timestamp("us", "UTC"))
    days = microseconds // 86_400_000_000
    day = pa.array([days] * 5, pa.int32()).cast(pa.date32())
    write(place, at=at, day=day, parts=pa.StructArray.from_arrays([at], ["at"]))
    found = execute(
        place,
        "SELECT extract(epoch FROM at) * 1000000, day - '1970-01-01'::date, extract(epoch FROM "
        "(parts->>'at')::timestamptz) * 1000000 FROM shop.orders ORDER BY \"offset\"",
    )
    assert found[:3] == [(0, days, 0), (microseconds, days, microseconds), (None, days, None)]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("text", "a\x00b", "NUL"),
        ("jsonb", {"a": "\x00"}, "u0000"),
        ("varchar(3)", "abc ", r"4 characters, which character varying\(3\) does not store"),
        ("char(3)", "ab", "2 characters"),
        ("uuid", "none", "uuid"),
        ("shop.small", 11, "small_check"),
    ],
)
def test_refused_value_is_named_with_its_record(
    place: str, column: str, value: object, reason: str
) -> None:
    execute(place, "CREATE DOMAIN shop.small AS bigint CHECK (value < 10)")
    named = r"the record of orders-0 with offset 2\b"
    with pytest.raises(psycopg.DataError, match=rf"(?s){named}.*{reason}.*Nothing was written"):
        write_column(place, column, [None, None, value])
    assert execute(place, "SELECT 1 FROM shop.orders") == []


def test_json_has_the_form_of_decoded_values(place: str) -> None:
    value = {"b": b"\xff", "d": Decimal("1.10"), "t": datetime(2020, 1, 2, tzinfo=timezone.utc)}
    (found,) = write_column(place, "text", [value])
    assert json.loads(found) == {"b": "/w==", "d": "1.10", "t": "2020-01-02 00:00:00+00:00"}
