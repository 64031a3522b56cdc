"""Which range a staged Parquet file holds, by the statistics in its footer.

Owns when a file that Spark wrote without being told of ranges can be the file of one: all of its
records are of that range, and no other file has any of them. Only for files that this process sees.
Never reads a record.
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
        """What its folder stands for, and the name of its file, as `output` has Spark name them."""
        topic = self.topic
        if not _PLAIN_TOPIC.fullmatch(topic):
            digest = hashlib.sha256(topic.encode()).hexdigest()
            topic = f"{_UNSAFE.sub('_', topic.lower())[:100]}~{digest[:16]}"
        return f"{topic}-p{self.partition}", f"{self.start}-{self.until}"


def local_folder(path: str) -> Path | None:
    """A folder by the name that Spark has for it; None where only Spark can reach it.

    Hadoop takes `..` out of a name without a look at what the folder before it is.
    """
    name = path.removeprefix("file:")
    if name.startswith("//"):
        name = name.removeprefix("//")
        return _normal(name) if name.startswith("/") else None  # a host's name stands before it
    return None if urlsplit(name).scheme else _normal(name)


def _normal(name: str) -> Path:
    return Path(os.path.normpath(Path(name).absolute()))


def ranges_by_file(folder: Path, records: int) -> dict[Path, RangeKey] | None:
    """The staged files, and the range that each one holds as a whole.

    Args:
        folder: Where Spark has written.
        records: How many records it says to have written.

    Returns:
        None when a file holds more than one range or part of one, or when not all of the records
        are seen here: a mounted folder may show a file late, and one may be encrypted.
    """
    from pyarrow import ArrowException, parquet

    found: dict[Path, RangeKey] = {}
    seen = 0
    for file in _files(folder):
        try:
            footer = parquet.read_metadata(file)
        except (OSError, ArrowException):
            return None
        if not footer.num_rows:
            continue
        key = _only_range(footer)
        if key is None:
            return None
        seen += footer.num_rows
        found[file] = key
    is_whole = seen == records and len({key.place for key in found.values()}) == len(found)
    return found if is_whole else None


def stored_schemas(output: Path) -> Iterator[tuple[Path, str | None]]:
    """The files of an output, and the schema that Spark has noted in each, as JSON.

    It is None in a file that another program has written, or that this process cannot read.
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
    """List lazily: an output may have a folder per partition, with many files in each."""
    try:
        with os.scandir(output) as folders:
            for folder in folders:
                if "=" in folder.name and folder.is_dir():
                    with os.scandir(folder) as files:
                        yield from (Path(file) for file in files if _is_data(file.name))
    except FileNotFoundError:
        return


def _is_data(name: str) -> bool:
    return name.endswith(".parquet") and not name.startswith(("_", "."))


def _files(folder: Path) -> Iterator[Path]:
    """What Spark takes for files of an output: neither its own notes nor work in progress."""
    return (file for file in folder.glob("*.parquet") if _is_data(file.name))


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
    """The value that all records have; None when there are several, or some have none."""
    if statistics is None or not statistics.has_min_max or not statistics.has_null_count:
        return None
    is_one = statistics.null_count == 0 and statistics.min == statistics.max
    return statistics.min if is_one else None
