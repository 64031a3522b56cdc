"""Ranges in a Postgres table from Arrow: one transaction replaces the rows of ranges.

Records are first copied into a temporary table of the connection, without a lock. Then one message
has the whole transaction: it locks the Kafka partitions, deletes the rows of the ranges, inserts
the copied ones and commits. The server executes it without another word of the client. A client
that is killed or frozen at any moment therefore holds no lock, and the transaction takes place as a
whole or not at all.
"""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_rebalance.arrow.range_records import RangeRecords
from dagster_rebalance.arrow.records import library
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.rows import COLUMNS
from dagster_rebalance.outputs.scratch import current_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

_STAGED = "dagster_rebalance_staged"


def write_postgres(
    records: Any, table: str, ranges: Sequence[OffsetRange], *, connection: str
) -> None:
    """Write records to a Postgres table, replacing ranges that were written before.

    One transaction deletes the table's rows of the ranges and inserts the records. Readers never
    see a partial write, and a writer that is killed leaves nothing visible. Concurrent writers of a
    Kafka partition take turns, and the later one replaces the rows of the earlier one. Memory is
    bounded. Write all records of the ranges in one call.

    The table must exist, with the columns of the records, and needs an index on `topic`,
    `partition` and `offset`. Columns that the records do not have get their default. Structs, lists
    and maps are written as JSON, with bytes in them as text.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch) -> None:
            url = os.environ["SHOP_DATABASE"]
            write_postgres(kafka_batch.arrow(), "orders", kafka_batch.offset_ranges, connection=url)
        ```

    Args:
        records: A `pyarrow.RecordBatchReader`, a `pyarrow.Table`, or another object with an Arrow
            stream, with the columns `topic`, `partition` and `offset`.
        table: The name of the table, optionally with its schema (`shop.orders`).
        ranges: The ranges of the records, such as `kafka_batch.offset_ranges`. If there are no
            records of a range, the table has none afterwards. If `ranges` is empty, nothing
            changes.
        connection: The URL or the parameters of the database, as libpq takes them. A connection
            pooler must assign a server process per session, because of the temporary table.

    Raises:
        IllegalStateError: A required column is missing; names differ only in capitals; the table
            lacks a column; a record is in none of the ranges, or there are records but no ranges.
            Nothing was written.
        ConfigurationError: psycopg or the table is missing.
        BrokerError: Kafka no longer has all of the offsets.
        psycopg.Error: The database refused the records or is unreachable.
    """
    psycopg = library("psycopg", "postgres")
    sql = library("psycopg.sql", "postgres")
    name = sql.Identifier(*table.split("."))
    with RangeRecords.of(records, table, ranges) as given:
        if given is None:
            return
        columns = sql.SQL(", ").join(map(sql.Identifier, given.schema.names))
        with psycopg.connect(connection, autocommit=True) as database:
            _create_staged(database, name, columns, table)
            with given.reader() as reader, database.cursor() as cursor:
                _copy(cursor, columns, reader)
            scratch = current_scratch()
            end = sql.SQL(
                "COMMIT" if scratch is None else "SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK"
            )
            # One message without parameters, which the server executes to its end.
            database.execute(
                sql.SQL("; ").join([*_statements(name, columns, _oid(database, name), given), end])
            )
        if scratch is not None:
            scratch.add("Postgres", table, *given.content())


def _create_staged(database: Any, name: Any, columns: Any, table: str) -> None:
    """Create an empty temporary table with the types of the table."""
    errors = import_module("psycopg.errors")
    sql = import_module("psycopg.sql")
    statement = sql.SQL("CREATE TEMPORARY TABLE {} AS SELECT {} FROM {} WITH NO DATA")
    try:
        database.execute(statement.format(sql.Identifier(_STAGED), columns, name))
    except errors.UndefinedTable as error:
        msg = (
            f"the table {table} does not exist: create it with the columns of the records "
            '(topic text, partition int, "offset" bigint, ...), and an index on (topic, partition, '
            '"offset").'
        )
        raise ConfigurationError(msg) from error
    except errors.UndefinedColumn as error:
        msg = (
            f"the table {table} does not have all columns of the records ({error}): add the column "
            "to the table, or drop it from the records. Nothing was written."
        )
        raise IllegalStateError(msg) from error


def _copy(cursor: Any, columns: Any, reader: Any) -> None:
    sql = import_module("psycopg.sql")
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(_STAGED), columns)
    converters = [_converter(field.type) for field in reader.schema]
    with cursor.copy(statement) as copy:
        for batch in reader:
            for row in zip(*map(_values, batch.columns, converters), strict=True):
                copy.write_row(row)


def _values(column: Any, convert: Callable[[Any], Any] | None) -> Iterator[Any]:
    values = column.to_pylist()
    if convert is None:
        return iter(values)
    return (None if value is None else convert(value) for value in values)


def _converter(type_: Any) -> Callable[[Any], Any] | None:
    """Return how values are written that Postgres has no type for: as JSON."""
    is_nested = import_module("pyarrow").types.is_nested(type_)
    return partial(json.dumps, default=_json) if is_nested else None


def _json(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _oid(database: Any, name: Any) -> int:
    """Return the id of a table, because writers may give it different names."""
    found = database.execute("SELECT %s::regclass::oid", [name.as_string(database)]).fetchone()
    return int(found[0])


def _statements(name: Any, columns: Any, oid: int, given: RangeRecords) -> list[Any]:
    """Return the statements of a transaction that replaces the rows of ranges, except its end."""
    sql = import_module("psycopg.sql")
    partitions = sorted({(topic, partition) for topic, partition, *_ in given.rows.spans})
    # In one order, so two writers cannot wait for each other.
    locks = [
        sql.SQL("SELECT pg_advisory_xact_lock(hashtextextended({}, 0))").format(
            sql.Literal(f"{oid} {topic}-{partition}")
        )
        for topic, partition in partitions
    ]
    topic, partition, offset = map(sql.Identifier, COLUMNS)
    deletes = [
        sql.SQL("DELETE FROM {} WHERE {} = {} AND {} = {} AND {} >= {} AND {} < {}").format(
            name,
            topic,
            sql.Literal(span[0]),
            partition,
            sql.Literal(span[1]),
            offset,
            sql.Literal(span[2]),
            offset,
            sql.Literal(span[3]),
        )
        for span in given.rows.spans
    ]
    insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
        name, columns, columns, sql.Identifier(_STAGED)
    )
    begin = sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED")
    return [begin, *locks, *deletes, insert]
