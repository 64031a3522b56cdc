"""Publication of staged Parquet files: each is moved over its target in one atomic step.

No file of an output is deleted or truncated first, so a reader finds the old or the new file at any
moment, even if a writer is killed. On a mounted file system the step is a rename, in an object
store a copy of an object.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.layout import STORES, RangeKey, file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from dagster_rebalance.core.model.offsets import OffsetRange

OLD_FOLDER = "topic="
"""Begins the names of the folders of version 0.1.0."""
_CROSS_DEVICE = f"[Errno {errno.EXDEV}]"
_failed_ranges: list[OffsetRange] = []
LEFT_OVER_AFTER_S = 2 * 24 * 3600.0
# Longer than any write, and far below the age at which other writers remove staging folders.
_STAGING_LIMIT_S = LEFT_OVER_AFTER_S / 2


def note_failed_ranges(ranges: Iterable[OffsetRange]) -> None:
    """Note the larger ranges of which the batch of this process is a part, and which have failed.

    With `on_failure="bisect"`, an attempt may have written a range before it failed. Its file is
    deleted before the file of a part is published. No offset of the range is committed.
    """
    _failed_ranges[:] = ranges


def failed_files(root: str) -> list[str]:
    """Return the files that failed attempts on larger ranges may have written to an output."""
    keys = (RangeKey(r.topic, r.partition, r.start, r.until) for r in _failed_ranges)
    return [f"{root}/{file_of(key)}" for key in keys]


def refuse_scheme(scheme: str) -> ConfigurationError:
    """Return the error for a file system that cannot replace a file in one step."""
    return ConfigurationError(
        f"output by range cannot be written to {scheme}: it cannot replace a file in one step, "
        "so two writers of a range could duplicate or lose its records. Write to a "
        "mounted file system (file:), HDFS (hdfs:, with Spark), S3 (s3a:) or Google Cloud Storage "
        "(gs:)."
    )


def check_duration(staged: str, took_s: float) -> None:
    """Raise IllegalStateError if a write took so long that its files may be gone."""
    if took_s > _STAGING_LIMIT_S:
        msg = (
            f"the write took longer than a day, so other writers may remove {staged}. "
            "Nothing was changed in the output. Write smaller batches."
        )
        raise IllegalStateError(msg)


def check_one_file_system(output: Path) -> None:
    """Raise ConfigurationError if an output is on another file system than its staging folder."""
    with suppress(FileNotFoundError):
        if output.stat().st_dev != output.parent.stat().st_dev:
            raise ConfigurationError(_other_file_system(str(output)))


@contextmanager
def explained_publication(root: str) -> Iterator[None]:
    """Explain the error of a move to another file system.

    The error is recognized by its text, because it may come from a worker of Spark.
    """
    try:
        yield
    except Exception as error:
        if _CROSS_DEVICE not in str(error):
            raise
        raise ConfigurationError(_other_file_system(root)) from error


def old_output(root: str) -> IllegalStateError:
    """Return the error for an output of version 0.1.0."""
    return IllegalStateError(
        f"the output {root} was written by version 0.1.0, as topic=/partition=/...: a range "
        "that is written again would not replace its old file. Write to a new path, and copy "
        "the old output there once by reading it and writing it with this function."
    )


def _other_file_system(output: str) -> str:
    return (
        f"{output} is on another file system than its staging folder beside it, because it, or a "
        "folder in it, is a link or a mounted volume. A file cannot be moved there in one step: "
        "give a folder within the volume, by its real path."
    )


def mounted_publisher() -> Callable[..., bool]:
    """Return a function that publishes on a mounted file system.

    The function takes URIs, those of obsolete files as lines of one text, and returns True if it
    refused an output of version 0.1.0. It is a closure with its own imports, so a worker of Spark
    without this package can run it.
    """

    def publish_mounted(
        root: str, sources: list[str], places: list[str], staging: str, obsolete: str = ""
    ) -> bool:
        import contextlib
        import os
        import shutil
        import time
        from urllib.parse import unquote, urlsplit

        def path_of(uri: str) -> str:
            return unquote(urlsplit(uri).path)

        folder = path_of(root)
        names = os.listdir(folder) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
        if any(name.startswith(OLD_FOLDER) for name in names):
            return True
        for uri in filter(None, obsolete.split("\n")):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path_of(uri))  # noqa: PTH107
        for source, place in zip(sources, places, strict=True):
            os.makedirs(os.path.dirname(path_of(place)), exist_ok=True)  # noqa: PTH103, PTH120
            os.replace(path_of(source), path_of(place))  # noqa: PTH105
        attempt = path_of(staging)
        shutil.rmtree(attempt, ignore_errors=True)
        with os.scandir(os.path.dirname(attempt)) as others:  # noqa: PTH120
            for other in others:
                with contextlib.suppress(FileNotFoundError):  # its writer has just ended
                    if time.time() - other.stat().st_mtime > LEFT_OVER_AFTER_S:
                        shutil.rmtree(other.path, ignore_errors=True)
        return False

    return publish_mounted


def store_of(root: str) -> Any:
    """Return the file system of an object store in pyarrow."""
    try:
        from pyarrow.fs import FileSystem
    except ImportError as error:
        msg = "output by range in an object store needs pyarrow: install it."
        raise ConfigurationError(msg) from error
    parts = urlsplit(root)
    store, _ = FileSystem.from_uri(f"{STORES[parts.scheme]}://{parts.netloc}")
    return store


def store_key(uri: str) -> str:
    """Return the bucket and key of a URI."""
    parts = urlsplit(uri)
    return f"{parts.netloc}{unquote(parts.path)}"


def publish_in_store(store: Any, root: str, moves: Mapping[str, str], staging: str) -> bool:
    """Copy staged objects to their targets; return True for an output of version 0.1.0."""
    from pyarrow.fs import FileSelector, FileType

    children = store.get_file_info(FileSelector(store_key(root), allow_not_found=True))
    if any(child.base_name.startswith(OLD_FOLDER) for child in children):
        return True
    for uri in failed_files(root):
        if store.get_file_info(store_key(uri)).type != FileType.NotFound:
            store.delete_file(store_key(uri))
    for source, place in moves.items():
        store.copy_file(store_key(source), store_key(place))
    with suppress(FileNotFoundError):  # nothing was staged, and a store has no empty folders
        store.delete_dir(store_key(staging))
    return False
