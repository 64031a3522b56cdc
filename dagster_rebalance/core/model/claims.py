"""Claims: the text that a member stores as metadata of a committed offset.

Format: `dr2 <crc32> <json>`. `o` is the offset that the text belongs to; `c` is `[[until,
batch_id], ...]` in offset order, with a third id for the batch that the range was taken from; `l`
is `[start, batch_id, run_id]` of the last commit, with a fourth item `1` for a dead letter; `t` is
the topic id and `e` the leader epoch (see `Log`). Empty and unknown fields are omitted. Format 1
(release 0.1.0) has only `c` and `l`; it is read and never written. Empty text means no claims. Text
that is foreign, newer, damaged or stored beside another offset is refused with a reason, because
overwriting it could erase the work of others.
"""

# Theory of operation: the claim protocol
#
# A group needs one answer to "which offsets does which work cover?" that survives the crash of any
# process. The answer is the metadata of the committed offset: Kafka stores offset and metadata in
# one write, and refuses that write from a member that it has fenced.
#
# For a partition at committed offset 100:
#
#   claim     offset 100, claims [(120, b1)]        before any work begins; the offset is unchanged
#   claim     offset 100, claims [(120, b1), (150, b2)]
#   commit    offset 120, claims [(150, b2)], last commit (100, b1, run)     b1 has succeeded
#
# Rules:
#
# 1. No claim, no work. A run reads the metadata itself when it starts and refuses to work unless
#    each of its ranges is claimed by its batch (`core.runs.start_check`). A member that was fenced
#    cannot write the claim, so none of its batches begins.
# 2. Bounds are final. A claim never grows, shrinks or disappears; only a commit removes it, from
#    the front. Every attempt of a batch reads the same offsets, so output that is keyed by the
#    range is replaced and never doubled. A claim is also never withdrawn after a failed write: it
#    names bounds and an id, and does not say that a run is at work.
# 3. Commits are in order. The offset moves to the end of the first claim once a run has succeeded
#    on all of it, in one write with the remaining claims and `last_commit`.
# 4. Every write is conditional. The member compares the stored value with the one that it expects
#    (`core.model.commands.compared`), and writes nothing if they differ. An answer of an earlier
#    epoch is dropped.
# 5. The record in Dagster follows the commit. If the process dies in between, the next owner finds
#    `last_commit` without its record, and records it. So Dagster shows each commit once.
# 6. The batch id of a claim changes in streaming runs only: for each attempt, and when the next
#    owner takes the range over. `taken_from` names the former batch for as long as its run may
#    still work on the range.

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from dagster_rebalance.core.model.commit_requests import MAX_METADATA_BYTES
from dagster_rebalance.core.model.errors import ClaimError, IllegalStateError
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    Log,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)

_HEADER = re.compile(r"dr(?P<version>[0-9]{1,4}) (?P<crc>[0-9a-f]{8}) (?P<body>.*)", re.DOTALL)
_VERSION = "2"
_READABLE = {"1": {"c", "l"}, _VERSION: {"o", "c", "l", "t", "e"}}
"""The fields of each format that can be read."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_TOPIC_ID = re.compile(r"[A-Za-z0-9+/_=-]{1,32}")
_LARGEST_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Range that a batch works on, from the end of the previous claim or the committed offset.

    Attributes:
        taken_from: The batch that held the claim before, while its runs may still work on the
            range.
    """

    until: int
    batch_id: str
    taken_from: str = ""


@dataclass(frozen=True, slots=True)
class LastCommit:
    """Batch and run of the last commit.

    If a member crashes between a commit and its record in Dagster, the next owner records it from
    this.

    Attributes:
        start: The first offset of the commit.
        run_id: The run that succeeded; for a dead letter, the last run that failed.
    """

    start: int
    batch_id: str
    run_id: str
    is_dead_letter: bool = False


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """Everything that a group stores for one partition."""

    next_offset: int
    claims: tuple[Claim, ...] = ()
    last_commit: LastCommit | None = None
    log: Log = Log()  # noqa: RUF009 - frozen, so sharing the default is safe

    @property
    def claimed_until(self) -> int:
        """The end of the last claim, or the committed offset."""
        return self.claims[-1].until if self.claims else self.next_offset

    def ranges(self, partition: TopicPartition) -> tuple[tuple[OffsetRange, str], ...]:
        """Return the claimed ranges with their batch ids, in offset order."""
        bounds = (self.next_offset, *(claim.until for claim in self.claims))
        return tuple(
            (OffsetRange(partition.topic, partition.partition, start, until), claim.batch_id)
            for (start, until), claim in zip(pairwise(bounds), self.claims, strict=True)
        )


def encode(stored: StoredPartition) -> OffsetAndMetadata:
    """Return the offset and metadata to commit.

    Raises:
        IllegalStateError: The claims are out of order, an id could not be read back, or the text
            exceeds 4,095 bytes.
    """
    problem = _problem(stored)
    if problem is not None:
        msg = f"refusing to store {stored}: {problem}"
        raise IllegalStateError(msg)
    if stored == StoredPartition(stored.next_offset):
        return OffsetAndMetadata(stored.next_offset)
    body: dict[str, object] = {"o": stored.next_offset}
    if stored.claims:
        body["c"] = [
            [claim.until, claim.batch_id, *([claim.taken_from] if claim.taken_from else [])]
            for claim in stored.claims
        ]
    if stored.last_commit is not None:
        last = stored.last_commit
        body["l"] = [last.start, last.batch_id, last.run_id, *([1] if last.is_dead_letter else [])]
    if stored.log.topic_id:
        body["t"] = stored.log.topic_id
    if stored.log.leader_epoch is not None:
        body["e"] = stored.log.leader_epoch
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    metadata = f"dr{_VERSION} {_crc(text)} {text}"
    if len(metadata) > MAX_METADATA_BYTES:
        msg = (
            f"{len(stored.claims)} claims need {len(metadata)} bytes of metadata; "
            f"{MAX_METADATA_BYTES} fit: claim fewer batches"
        )
        raise IllegalStateError(msg)
    return OffsetAndMetadata(stored.next_offset, metadata)


def decode(committed: OffsetAndMetadata) -> StoredPartition:
    """Parse what a group has committed for a partition.

    Raises:
        ClaimError: The metadata is foreign, newer, damaged or stored beside another offset.
    """
    text = committed.metadata
    if not text:
        return StoredPartition(committed.offset)
    header = _HEADER.fullmatch(text)
    if header is None:
        raise _unreadable(
            text,
            "was not written by dagster_rebalance: another application commits to this group. Stop "
            "the other application, or use "
            "a separate group for this one",
        )
    version = header["version"]
    if version not in _READABLE:
        raise _unreadable(
            text,
            f"has format version {version}, this release reads versions up to {_VERSION}: upgrade "
            "it",
        )
    if header["crc"] != _crc(header["body"]):
        raise _unreadable(text, "is damaged: its checksum does not match")
    fields = _fields(header["body"], _READABLE[version])
    written_beside = committed.offset if version == "1" or fields is None else fields.get("o")
    stored = (
        None
        if fields is None or not _is_whole(written_beside)
        else _parse(committed.offset, fields)
    )
    if stored is None:
        raise _unreadable(text, "is damaged: it does not have the fields of a claim")
    if written_beside != committed.offset:
        raise _unreadable(
            text,
            f"was written beside offset {written_beside}, but is stored beside {committed.offset}: "
            "a tool that synchronises offsets "
            "between clusters, such as MirrorMaker, copied it to an offset that it translated",
        )
    problem = _problem(stored)
    if problem is not None:
        raise _unreadable(text, f"does not fit the committed offset {committed.offset}: {problem}")
    return stored


def _unreadable(text: str, why: str) -> ClaimError:
    return ClaimError(f"the metadata {_excerpt(text)} {why}")


def _fields(body: str, known: set[str]) -> dict[str, object] | None:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and fields.keys() <= known else None


def _parse(offset: int, fields: dict[str, Any]) -> StoredPartition | None:
    try:
        claims = tuple(_claim(*parts) for parts in fields.get("c", ()))
        last = None
        if "l" in fields:
            start, batch_id, run_id, *mark = fields["l"]
            if mark not in ([], [1]):
                return None
            last = LastCommit(
                _whole(start), _text(batch_id), _text(run_id), is_dead_letter=bool(mark)
            )
        log = Log(_text(fields.get("t", "")), _whole(fields["e"]) if "e" in fields else None)
    except (ValueError, TypeError):
        return None
    return StoredPartition(offset, claims, last, log)


def _claim(until: object, batch_id: object, taken_from: object = "") -> Claim:
    return Claim(_whole(until), _text(batch_id), _text(taken_from))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_OFFSET


def _whole(value: object) -> int:
    if not _is_whole(value):
        raise TypeError(value)
    return cast("int", value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _problem(stored: StoredPartition) -> str | None:
    if stored.next_offset < 0:
        return f"the offset {stored.next_offset} is negative"
    bounds = (stored.next_offset, *(claim.until for claim in stored.claims))
    not_growing = [pair for pair in pairwise(bounds) if pair[0] >= pair[1]]
    if not_growing:
        return f"the claims do not grow from the offset: {not_growing[0]}"
    last = stored.last_commit
    if last is not None and not 0 <= last.start < stored.next_offset:
        return (
            f"the last commit starts at {last.start}, which is not below the offset "
            f"{stored.next_offset}"
        )
    log = stored.log
    if log.topic_id and not _TOPIC_ID.fullmatch(log.topic_id):
        return f"{_excerpt(log.topic_id)} is not the id of a topic"
    if log.leader_epoch is not None and not 0 <= log.leader_epoch <= _LARGEST_EPOCH:
        return f"{log.leader_epoch} is not a leader epoch"
    identifiers = [claim.batch_id for claim in stored.claims]
    identifiers += [claim.taken_from for claim in stored.claims if claim.taken_from]
    if last is not None:
        identifiers += [last.batch_id, last.run_id]
    bad = [identifier for identifier in identifiers if not _IDENTIFIER.fullmatch(identifier)]
    return f"{_excerpt(bad[0])} is not an id of a batch or a run" if bad else None


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")  # noqa: PLR2004 - a line of a log
