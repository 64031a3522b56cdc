"""Claims: what a partition's committed offset says about work that was asked for but is not committed yet.

Owns the text that is stored as metadata of the committed offset: which ranges after the offset are claimed by which batch, and what the
last commit was. It is written before any work starts, so whoever owns the partition next finds the same ranges under the same batch ids.

Format: `dr1 <crc32> <json>`, JSON with `c` = `[[until, batch_id], ...]` in offset order and `l` = `[start, batch_id, run_id]`, with a `1`
behind it for a range that went to the dead-letter topic.
Text that is empty means "no claims". Text by others, by a newer version or damaged is refused with a reason, never guessed at: overwriting
it could erase somebody's work.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from itertools import pairwise

from dagster_rebalance.core.errors import ClaimError, IllegalStateError
from dagster_rebalance.core.partition import MAX_OFFSET, OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.pausing import MARK_BYTES

MAX_METADATA_BYTES = 4096 - MARK_BYTES
"""The broker's default `offset.metadata.max.bytes`, less the room for a pause mark in front of the claims."""

_HEADER = re.compile(r"dr(?P<version>[0-9]{1,4}) (?P<crc>[0-9a-f]{8}) (?P<body>.*)", re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A range that a batch works on; it starts where the claim before it, or the committed offset, ends."""

    until: int
    batch_id: str


@dataclass(frozen=True, slots=True)
class LastCommit:
    """Where the committed offset came from, so that a commit that was not recorded before a crash can be recorded later.

    An empty `run_id` never occurs in a commit of this package; `start` is the first offset that the commit covered. Of a range that went to
    the dead-letter topic, `run_id` is the last run that failed.
    """

    start: int
    batch_id: str
    run_id: str
    is_dead_letter: bool = False


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """Everything a group stores for one partition: the next offset, the claims behind it, and the last commit."""

    next_offset: int
    claims: tuple[Claim, ...] = ()
    last_commit: LastCommit | None = None

    def ranges(self, partition: TopicPartition) -> tuple[tuple[OffsetRange, str], ...]:
        """The claimed ranges with their batch ids, in offset order."""
        bounds = (self.next_offset, *(claim.until for claim in self.claims))
        return tuple(
            (OffsetRange(partition.topic, partition.partition, start, until), claim.batch_id)
            for (start, until), claim in zip(pairwise(bounds), self.claims, strict=True)
        )


def encode(stored: StoredPartition) -> OffsetAndMetadata:
    """Turn what is to be stored into an offset and its metadata.

    Raises:
        IllegalStateError: The claims are out of order, an id has characters that could not be read back, or the text is over 4,096 bytes.
    """
    problem = _problem(stored)
    if problem is not None:
        msg = f"refusing to store {stored}: {problem}"
        raise IllegalStateError(msg)
    if not stored.claims and stored.last_commit is None:
        return OffsetAndMetadata(stored.next_offset)
    body: dict[str, object] = {}
    if stored.claims:
        body["c"] = [[claim.until, claim.batch_id] for claim in stored.claims]
    if stored.last_commit is not None:
        last = stored.last_commit
        body["l"] = [last.start, last.batch_id, last.run_id, *([1] if last.is_dead_letter else [])]
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    metadata = f"dr1 {_crc(text)} {text}"
    if len(metadata) > MAX_METADATA_BYTES:
        msg = f"{len(stored.claims)} claims need {len(metadata)} bytes of metadata; {MAX_METADATA_BYTES} fit: claim fewer batches"
        raise IllegalStateError(msg)
    return OffsetAndMetadata(stored.next_offset, metadata)


def decode(committed: OffsetAndMetadata) -> StoredPartition:
    """Read what a group has stored for a partition.

    Raises:
        ClaimError: The metadata was not written by this package, by a newer version of it, or is damaged. The message says which.
    """
    text = committed.metadata
    if not text:
        return StoredPartition(committed.offset)
    header = _HEADER.fullmatch(text)
    if header is None:
        raise _unreadable(text, "was not written by dagster_rebalance: another application commits to this group")
    if header["version"] != "1":
        raise _unreadable(text, f"has format version {header['version']}, this release reads version 1: upgrade it")
    if header["crc"] != _crc(header["body"]):
        raise _unreadable(text, "is damaged: its checksum does not match")
    stored = _parse(committed.offset, header["body"])
    if stored is None:
        raise _unreadable(text, "is damaged: it does not have the fields of a claim")
    problem = _problem(stored)
    if problem is not None:
        raise _unreadable(text, f"does not fit the committed offset {committed.offset}: {problem}")
    return stored


def _unreadable(text: str, why: str) -> ClaimError:
    return ClaimError(f"the metadata {_excerpt(text)} {why}")


def _parse(offset: int, body: str) -> StoredPartition | None:
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or not fields.keys() <= {"c", "l"}:
            return None
        claims = tuple(Claim(_whole(until), _text(batch_id)) for until, batch_id in fields.get("c", ()))
        if "l" not in fields:
            return StoredPartition(offset, claims)
        start, batch_id, run_id, *mark = fields["l"]
        if mark not in ([], [1]):
            return None
        return StoredPartition(offset, claims, LastCommit(_whole(start), _text(batch_id), _text(run_id), is_dead_letter=bool(mark)))
    except (ValueError, TypeError, RecursionError):
        return None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_OFFSET:
        raise TypeError(value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _problem(stored: StoredPartition) -> str | None:
    """Why `stored` cannot be right, or None."""
    if stored.next_offset < 0:
        return f"the offset {stored.next_offset} is negative"
    bounds = (stored.next_offset, *(claim.until for claim in stored.claims))
    not_growing = [pair for pair in pairwise(bounds) if pair[0] >= pair[1]]
    if not_growing:
        return f"the claims do not grow from the offset: {not_growing[0]}"
    last = stored.last_commit
    if last is not None and not 0 <= last.start < stored.next_offset:
        return f"the last commit starts at {last.start}, which is not below the offset {stored.next_offset}"
    identifiers = [claim.batch_id for claim in stored.claims]
    if last is not None:
        identifiers += [last.batch_id, last.run_id]
    bad = [identifier for identifier in identifiers if not _IDENTIFIER.fullmatch(identifier)]
    return f"{_excerpt(bad[0])} is not an id of a batch or a run" if bad else None


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")  # noqa: PLR2004 - a line of a log
