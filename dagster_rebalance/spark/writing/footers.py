"""The range that a staged Parquet file holds, by the statistics in its footer.

A file that Spark wrote without gathering ranges is the file of one range if all of its records are
of that range, and no other file has any of them. Records are never read, and the files must be
visible to this process.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = ("topic", "partition", "range_start", "range_until")
_SCHEMA_NOTE = b"org.apache.spark.sql.parquet.row.metadata"
_PLAIN_TOPIC = re.compile(r"[a-z0-9._-]{1,150}")
_UNSAFE = re.compile(r"[^a-z0-9._-]")


class RangeKey(NamedTuple):
    """The columns of a record that name its range."""

    topic: str
    partition: int
    start: int
    until: int

    @property
    def place(self) -> tuple[str, str]:
        """The value of its folder and the name of its file, as `output` has Spark name them."""
        topic = self.topic
        if not _PLAIN_TOPIC.fullmatch(topic):
            digest = hashlib.sha256(topic.encode()).hexdigest()
            topic = f"{_UNSAFE.sub('_', topic.lower())[:100]}~{digest[:16]}"
        return f"{topic}-p{self.partition}", f"{self.start}-{self.until}"


def local_folder(path: str) -> Path | None:
    """Return the local folder of a path in Spark; None if only Spark can reach it."""
    name = path.removeprefix("file:")
    if name.startswith("//"):
        name = name.removeprefix("//")
        if not name.startswith("/"):  # it begins with a host
            return None
    elif urlsplit(name).scheme:
        return None
    # Hadoop removes `..` from a name without resolving links, and so does normpath.
    return Path(os.path.normpath(Path(name).absolute()))


def ranges_by_file(folder: Path, records: int) -> dict[Path, RangeKey] | None:
    """Return the staged files, and the range that each one holds as a whole.

    The result is None if a file holds several ranges or part of one, or if not all of the records
    that Spark counted are seen here: a mounted folder may show a file late, or files are encrypted.
    """
    from pyarrow import ArrowException, parquet

    ranges: dict[Path, RangeKey] = {}
    visible = 0
    for file in folder.glob("*.parquet"):
        if not _is_data(file.name):
            continue
        try:
            footer = parquet.read_metadata(file)
        except (OSError, ArrowException):
            return None
        if not footer.num_rows:
            continue
        key = _only_range(footer)
        if key is None:
            return None
        visible += footer.num_rows
        ranges[file] = key
    has_all = visible == records and len({key.place for key in ranges.values()}) == len(ranges)
    return ranges if has_all else None


def stored_schemas(output: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the files of an output, and the schema that Spark has noted in each, as JSON.

    The schema is None if another program wrote the file, or if this process cannot read it.
    """
    from pyarrow import ArrowException, parquet

    for file in _output_files(output):
        try:
            footer = parquet.read_metadata(file)
        except FileNotFoundError:
            continue  # deleted since the folder was listed
        except (OSError, ArrowException):
            yield file, None  # Spark may have the keys of an encrypted file
            continue
        noted = (footer.metadata or {}).get(_SCHEMA_NOTE)
        yield file, None if noted is None else noted.decode()


def _output_files(output: Path) -> Iterator[Path]:
    # Lazily, because an output may have a folder per partition, with many files in each.
    try:
        with os.scandir(output) as folders:
            for folder in folders:
                if "=" in folder.name and folder.is_dir():
                    with os.scandir(folder) as files:
                        yield from (Path(file) for file in files if _is_data(file.name))
    except FileNotFoundError:
        return


def _is_data(name: str) -> bool:
    """Whether Spark takes a file for data, and not for its own notes or work in progress."""
    return name.endswith(".parquet") and not name.startswith(("_", "."))


def _only_range(footer: Any) -> RangeKey | None:
    values: set[tuple[Any, ...]] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = (group.column(index) for index in range(group.num_columns))
        known = {
            column.path_in_schema: _only_value(column.statistics)
            for column in columns
            if column.path_in_schema in COLUMNS
        }
        values.add(tuple(known.get(name) for name in COLUMNS))
    if len(values) != 1:
        return None
    topic, *numbers = values.pop()
    if not isinstance(topic, str) or not all(type(one) is int and one >= 0 for one in numbers):
        return None
    return RangeKey(topic, *numbers)


def _only_value(statistics: Any) -> Any:
    """Return the value that all records have; None if there are several, or some have none."""
    if statistics is None or not statistics.has_min_max or not statistics.has_null_count:
        return None
    is_one = statistics.null_count == 0 and statistics.min == statistics.max
    return statistics.min if is_one else None
