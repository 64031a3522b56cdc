"""Names in a Parquet output: its path, and the folder and file of a range.

The layout is `topic_partition=<topic>-p<partition>/<start>-<until>.parquet`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COLUMNS = ("topic", "partition", "range_start", "range_until")
# Not `topic`: readers infer the type of a folder's value (007 is 7), and use it as the column.
FOLDER = "topic_partition"
FILE = "dagster_rebalance_range"
# A copy within these stores is one request; the new object appears when it is complete.
STORES = {"s3": "s3", "s3a": "s3", "gs": "gs"}
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
        """The value of its folder and the name of its file.

        File systems may ignore case, and limit a name to 255 characters. No topic has a ~.
        """
        topic = self.topic
        if not _PLAIN_TOPIC.fullmatch(topic):
            digest = hashlib.sha256(topic.encode()).hexdigest()
            topic = f"{_UNSAFE.sub('_', topic.lower())[:100]}~{digest[:16]}"
        return f"{topic}-p{self.partition}", f"{self.start}-{self.until}"


def file_of(key: RangeKey) -> str:
    """Return the path of a range within an output."""
    folder, name = key.place
    return f"{FOLDER}={folder}/{name}.parquet"


def check_columns(columns: Iterable[str]) -> None:
    """Raise IllegalStateError if columns do not have the range, or have a name of the paths."""
    known = list(columns)
    missing = [column for column in COLUMNS if column not in known]
    if missing:
        msg = (
            f"the output cannot be keyed by range: the column(s) {', '.join(missing)} of the "
            "batch's records are missing. Keep them."
        )
        raise IllegalStateError(msg)
    taken = [column for column in known if column.lower() in {FOLDER, FILE}]
    if taken:
        msg = f"the column(s) {', '.join(taken)} are part of the output's paths. Rename them."
        raise IllegalStateError(msg)


def parent_and_name(path: str) -> tuple[str, str]:
    """Split the path of an output; raise ConfigurationError for one that cannot be an output."""
    parent, slash, name = path.rstrip("/").rpartition("/")
    if not name or name in {".", ".."} or parent.endswith(":/") or re.search(r"[*?\[\]{}\\]", path):
        msg = (
            f"{path!r} cannot be the path of an output: give a folder below the root of its file "
            "system or bucket, without the characters * ? [ ] { } and \\, which are a pattern in "
            "Spark."
        )
        raise ConfigurationError(msg)
    return f"{parent}{slash}", name


def local_folder(path: str) -> Path | None:
    """Return the local folder of a path; None if it is not of a mounted file system."""
    name = path.removeprefix("file:")
    if name.startswith("//"):
        name = name.removeprefix("//")
        if not name.startswith("/"):  # it begins with a host
            return None
    elif urlsplit(name).scheme:
        return None
    # Hadoop removes `..` from a name without resolving links, and so does normpath.
    return Path(os.path.normpath(Path(name).absolute()))


def output_files(output: Path) -> Iterator[Path]:
    """Yield the data files of an output in a mounted folder.

    They are listed lazily, because an output may have a folder per partition, with many files.
    """
    try:
        with os.scandir(output) as folders:
            for folder in folders:
                if "=" in folder.name and folder.is_dir():
                    with os.scandir(folder) as files:
                        yield from (Path(file) for file in files if is_data(file.name))
    except FileNotFoundError:
        return


def is_data(name: str) -> bool:
    """Return whether readers treat a file as data, and not as metadata or work in progress."""
    return name.endswith(".parquet") and not name.startswith(("_", "."))


def place_of(uri: str) -> str:
    """Return the same name for a file, whichever scheme Spark uses for its file system."""
    parts = urlsplit(uri)
    scheme = STORES.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{unquote(parts.path)}"
