"""Ranges in a Postgres table from Arrow: one transaction replaces the rows of ranges.

Records are first copied into a temporary table of the connection, without a lock. Then one message
has the whole transaction: it locks the Kafka partitions, deletes the rows of the ranges, inserts
the copied ones and commits. The server executes it without another word of the client. A client
that is killed or frozen at any moment therefore holds no lock, and the transaction takes place as a
whole or not at all.

Policies, triggers and rules of the table may hide, keep or drop rows. The transaction therefore
fails if row security applies, if rows of the ranges are left after DELETE, or if the number of
their rows after INSERT is not that of the records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_rebalance.arrow.postgres_values import OWN, column_for, misfit, rows
from dagster_rebalance.arrow.range_records import RangeRecords
from dagster_rebalance.arrow.records import library
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.rows import COLUMNS
from dagster_rebalance.outputs.scratch import current_scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

_STAGED = ("pg_temp", "dagster_rebalance_staged")
_LINE = re.compile(rf"{_STAGED[1]}\W+\w+ (\d+)")
"""The number of a row in the context of an error, in most languages."""
_REFUSED = "DR001"
"""The state of errors that `_refuse_if` raises."""
_TABLE = """
    SELECT c.oid::bigint, COALESCE(pg_partition_root(c.oid), c.oid)::oid::bigint, nspname, relname,
        relkind IN ('r', 'p')
        AND (relispartition OR NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = c.oid))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
    WHERE c.oid = to_regclass(%s)
"""
_COLUMNS = """
    WITH RECURSIVE found(name, type, modifier) AS (
        SELECT attname, atttypid, atttypmod FROM pg_attribute
        WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
        UNION ALL
        SELECT name, typbasetype, typtypmod FROM found JOIN pg_type ON oid = type
        WHERE typtype = 'd'
    )
    SELECT name, format_type(type, modifier), typnamespace = 'pg_catalog'::regnamespace
    FROM found JOIN pg_type ON oid = type WHERE typtype <> 'd'
"""
"""The types of columns; of a domain, the type that it is based on."""


def write_postgres(
    records: Any, table: str, ranges: Sequence[OffsetRange], *, connection: str
) -> None:
    """Write records to a Postgres table, replacing ranges that were written before.

    One transaction deletes the table's rows of the ranges and inserts the records. Readers never
    see a partial write, and a writer that is killed leaves nothing visible. Concurrent writers of a
    Kafka partition take turns, and the later one replaces the rows of the earlier one. Memory is
    bounded. Write all records of the ranges in one call.

    The table must exist, with the columns of the records, and needs an index on `topic`,
    `partition` and `offset`: the error of a missing table contains both statements. Columns that
    the records do not have get their default. Structs, lists and maps are written as JSON, with
    bytes in base64 and with times, decimals, NaN and infinities as text.

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
        table: The name of the table, optionally with its schema (`shop.orders`), without quotes and
            with the capitals that the database has.
        ranges: The ranges of the records, such as `kafka_batch.offset_ranges`. If there are no
            records of a range, the table has none afterwards. If `ranges` is empty, nothing
            changes.
        connection: The URL or the parameters of the database, as libpq takes them. A connection
            pooler must assign a server process per session, because of the temporary table.

    Raises:
        IllegalStateError: A required column is missing; names differ only in capitals; the table
            lacks a column, or has a type that does not hold all values; a record is in none of the
            ranges, or there are records but no ranges. Nothing was written.
        ConfigurationError: psycopg or the table is missing; the name is that of a view; a right is
            missing; row security, a trigger or a rule hides, keeps or drops rows. Nothing was
            written.
        BrokerError: Kafka no longer has all of the offsets.
        psycopg.DataError: The database cannot store a value, whose offset is in the message.
        psycopg.Error: The database refused the records or is unreachable.
    """
    psycopg = library("psycopg", "postgres")
    scratch = current_scratch()
    with RangeRecords.of(records, table, ranges) as given:
        if given is None:
            return
        with psycopg.connect(connection, autocommit=True) as database:
            try:
                target = _Target.of(database, table, given.schema)
                _copy(database, target, given)
                # One message without parameters, which the server executes to its end.
                end = "COMMIT" if scratch is None else "ROLLBACK"
                database.execute(_transaction(database, target, given, end))
            except psycopg.errors.InsufficientPrivilege as error:
                msg = (
                    f"the role may not replace the rows of {table} ({error}): it needs SELECT, "
                    "INSERT and DELETE on the table and TEMPORARY on the database. Nothing was "
                    "written."
                )
                raise ConfigurationError(msg) from error
            except psycopg.Error as error:
                if error.sqlstate != _REFUSED:
                    raise
                raise ConfigurationError(error.diag.message_primary) from error
        if scratch is not None:
            scratch.add("Postgres", table, *given.content())


@dataclass(frozen=True)
class _Target:
    """A table that holds all values of the records.

    Attributes:
        given: The name from the caller.
        name: The name with its schema, in SQL.
        oid: The id of the table.
        root: The id of the partitioned table that it is a part of; its own id if there is none.
        columns: The names of the columns of the records, in SQL.
        types: Their types in the table.
    """

    given: str
    name: Any
    oid: int
    root: int
    columns: Any
    types: Sequence[str]

    @classmethod
    def of(cls, database: Any, table: str, schema: Any) -> _Target:
        """Return the table of a name; raise an error if it does not fit the records."""
        sql = import_module("psycopg.sql")
        name = sql.Identifier(*table.split(".")).as_string(database)
        found = database.execute(_TABLE, [name]).fetchone()
        if found is None:
            msg = (
                f"the table {table} does not exist (give its name without quotes, with the "
                f"capitals that the database has): CREATE TABLE {name} ({_definitions(schema)}); "
                f'CREATE INDEX ON {name} (topic, partition, "offset")'
            )
            raise ConfigurationError(msg)
        oid, root, namespace, relation, is_table = found
        if not is_table:
            msg = (
                f"{table} is a view, a foreign table or an inheritance child, with which writers "
                "cannot take turns: give the name of the table that contains its rows. Nothing "
                "was written."
            )
            raise ConfigurationError(msg)
        described = database.execute(_COLUMNS, [oid]).fetchall()
        types = {name: type_ if is_known else OWN for name, type_, is_known in described}
        if missing := [field for field in schema if field.name not in types]:
            msg = (
                f"the table {table} does not have all columns of the records: add "
                f"{_definitions(missing)} to the table, or drop them from the records. Nothing was "
                "written."
            )
            raise IllegalStateError(msg)
        columns = [types[field.name] for field in schema]
        misfits = [misfit(one.name, one.type, types[one.name]) for one in schema]
        if any(misfits):
            msg = (
                f"the table {table} does not hold all values of the records: "
                f"{'; '.join(filter(None, misfits))}. Nothing was written."
            )
            raise IllegalStateError(msg)
        names = sql.SQL(", ").join(map(sql.Identifier, schema.names))
        return cls(table, sql.Identifier(namespace, relation), oid, root, names, columns)


def _definitions(fields: Iterable[Any]) -> str:
    quote = import_module("psycopg.sql").Identifier
    return ", ".join(
        f"{quote(field.name).as_string(None)} {column_for(field.type) or 'text'}"
        for field in fields
    )


def _copy(database: Any, target: _Target, given: RangeRecords) -> None:
    """Copy the records into a temporary table with the types of the table."""
    psycopg, sql = import_module("psycopg"), import_module("psycopg.sql")
    create = sql.SQL("CREATE TEMPORARY TABLE {} AS SELECT {} FROM {} WITH NO DATA")
    staged = sql.Identifier(*_STAGED)
    database.execute(create.format(staged, target.columns, target.name))
    copy_from = sql.SQL("COPY {} ({}) FROM STDIN").format(staged, target.columns)
    copied = 0
    try:
        with given.reader() as reader, database.cursor() as cursor, cursor.copy(copy_from) as copy:
            for batch in reader:
                for row in rows(batch, target.types):
                    copy.write_row(row)
                    copied += 1
    except (ValueError, TypeError, psycopg.DataError, psycopg.IntegrityError) as error:
        diag = getattr(error, "diag", None)
        line = _LINE.search((diag and diag.context) or "")
        record = _record(given, int(line[1]) - 1 if line else copied)
        msg = f"{target.given} cannot store {record}: {error}. Nothing was written."
        raise psycopg.DataError(msg) from error


def _record(given: RangeRecords, row: int) -> str:
    with given.reader() as reader:
        for batch in reader:
            if row < batch.num_rows:
                topic, partition, offset = (batch[name][row].as_py() for name in COLUMNS)
                return f"the record of {topic}-{partition} with offset {offset}"
            row -= batch.num_rows
    return "a record"


def _transaction(database: Any, target: _Target, given: RangeRecords, end: str) -> Any:
    """Return the statements that replace the rows of ranges."""
    sql = import_module("psycopg.sql")
    staged = sql.Identifier(*_STAGED)
    partitions = sorted({(topic, partition) for topic, partition, *_ in given.rows.spans})
    # In one order, so two writers cannot wait for each other. By id, because writers may give the
    # table different names.
    locks = [
        sql.SQL("SELECT pg_advisory_xact_lock(hashtextextended({}, 0))").format(
            sql.Literal(f"{target.root} {topic}-{partition}")
        )
        for topic, partition in partitions
    ]
    topic, partition, offset = map(sql.Identifier, COLUMNS)
    deletes = [
        sql.SQL("DELETE FROM {} WHERE {} = {} AND {} = {} AND {} >= {} AND {} < {}").format(
            target.name,
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
        target.name, target.columns, target.columns, staged
    )
    stored = _stored(target, given)
    copied = sql.SQL("(SELECT count(*) FROM {})").format(staged)
    refuse_if = partial(_refuse_if, database)
    return sql.SQL("; ").join(
        [
            sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED"),
            *locks,
            *deletes,
            # The lock of DELETE prevents later changes of the table's name and policies.
            refuse_if(
                sql.SQL("to_regclass({}) IS DISTINCT FROM {}::oid").format(
                    sql.Literal(target.name.as_string(database)), sql.Literal(target.oid)
                ),
                f"{target.given} was replaced by another table during the write.",
            ),
            refuse_if(
                sql.SQL("row_security_active({}::oid)").format(sql.Literal(target.oid)),
                f"row security of {target.given} applies to the role, and may hide rows that must "
                "be replaced: use a role to which no policy applies, for example with BYPASSRLS.",
            ),
            refuse_if(
                sql.SQL("{} <> 0").format(stored),
                f"{target.given} kept rows of the ranges after their DELETE, which would be "
                "doubled: remove the trigger or rule, or write to a table without it.",
            ),
            insert,
            sql.SQL("SET CONSTRAINTS ALL IMMEDIATE"),
            refuse_if(
                sql.SQL("{} <> {}").format(stored, copied),
                f"{target.given} did not have the rows of the records after their INSERT: remove "
                "the trigger or rule that drops or adds rows, or write to a table without it.",
            ),
            sql.SQL(end),
        ]
    )


def _stored(target: _Target, given: RangeRecords) -> Any:
    """Return the number of rows that the table has of the ranges, in SQL."""
    sql = import_module("psycopg.sql")
    topic, partition, offset = map(sql.Identifier, COLUMNS)
    spans = sql.SQL(", ").join(
        sql.SQL("({}, {}, {}::bigint, {}::bigint)").format(*map(sql.Literal, span))
        for span in given.rows.spans
    )
    # Not a join, whose plan could read the whole table.
    return sql.SQL(
        "(SELECT COALESCE(sum(n), 0) FROM (VALUES {}) AS r (a, b, c, d), LATERAL "
        "(SELECT count(*) AS n FROM {} AS t WHERE t.{} = r.a AND t.{} = r.b AND t.{} >= r.c "
        "AND t.{} < r.d) AS s)"
    ).format(spans, target.name, topic, partition, offset, offset)


def _refuse_if(database: Any, condition: Any, reason: str) -> Any:
    """Return a statement that ends the transaction if a condition is true."""
    sql = import_module("psycopg.sql")
    check = sql.SQL(
        "BEGIN IF {} THEN RAISE EXCEPTION USING ERRCODE = {}, MESSAGE = {}; END IF; END"
    ).format(condition, sql.Literal(_REFUSED), sql.Literal(f"{reason} Nothing was written."))
    return sql.SQL("DO {}").format(sql.Literal(check.as_string(database)))
