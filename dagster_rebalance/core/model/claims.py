"""Claims: the text that a member stores as metadata of a committed offset.

Format: `dr2 <crc32> <json>`. `o` is the offset that the text was committed with; `c` is `[[until,
batch_id], ...]` sorted by offset, with the batch that the range was taken from as a third item; `l`
is `[start, batch_id, run_id]` of the last commit, with a fourth item `1` for a dead letter, and is
repeated for `LastCommit.earlier`; `t` is the topic id and `e` the leader epoch (see `Log`). A batch
id `s.<run>.<number>.0` is that of `Claim.is_early` for the batch `s.<run>.<number>.1`. Empty
and unknown fields are omitted. Format 1 (release 0.1.0) has only `c` and `l`; it is read and never
written. Empty text means no claims. Text that is foreign, newer, damaged or written with another
offset is refused with a reason, because overwriting it could erase the state of another
application.
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
#    range is replaced, not duplicated. A claim is also never withdrawn after a failed write: it
#    names bounds and an id, and does not say that a run is at work. One exception: if the attempts
#    on the first claim have failed because of its records, it is halved, see `core.runs.bisection`.
#    The parts cover the same offsets, and their batch ids name the range that was halved, so a run
#    on a part knows which larger ranges a failed attempt may have written.
# 3. Commits are in order. The offset moves to the end of the first claim once a run has succeeded
#    on all of it, in one write with the remaining claims and `last_commit`.
# 4. Every write is conditional. The member compares the stored value with the one that it expects
#    (`core.model.commands.compared`), and writes nothing if they differ. An answer of an earlier
#    epoch is dropped.
# 5. The record in Dagster follows the commit. If the process dies in between, the next owner finds
#    `last_commit` without its record, and records it. So Dagster shows each commit once
#    (`core.partitions.unrecorded`). Releases up to 0.2 know one part of `last_commit`, and refuse
#    unknown fields. So the parts are one field that occurs several times, the last part at the end:
#    JSON readers keep the last one. Such a release does not record the parts before it. It finds
#    them without a record only if the former owner crashed while a record was being stored.
# 6. The batch id of a claim changes in streaming runs only: for each attempt, and when the next
#    owner takes the range over. `previous_batch_id` names the former batch for as long as its run
#    may still work on the range.
# 7. A streaming run writes the claims of its next batch while one is at work, so the next one
#    begins without a write. Such a claim is marked as early until the next write of the partition
#    after its batch has begun. If the process dies before that write, its death is no attempt on
#    the range, because the batch may not have begun. The next owner claims the range again right
#    before it begins, without the mark, so a record that kills each process is uncounted once.

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from dagster_rebalance.core.model.commit_requests import MAX_METADATA_BYTES
from dagster_rebalance.core.model.errors import ClaimError, IllegalStateError
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    Log,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = re.compile(r"dr(?P<version>[0-9]{1,4}) (?P<crc>[0-9a-f]{8}) (?P<body>.*)", re.DOTALL)
_VERSION = "2"
_READABLE = {"1": {"c", "l"}, _VERSION: {"o", "c", "l", "t", "e"}}
"""The fields of each format that can be read."""

LEFT_OUT = "left-out"
"""In place of the batch and the run of a commit whose records the filter of the group leaves out.
Releases without filters read it as an id."""

_EARLY = re.compile(r"s\.[A-Za-z0-9-]+\.[0-9]+\.0")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TOPIC_ID = re.compile(r"[A-Za-z0-9+/_=-]{1,32}")
_LARGEST_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Range of a batch. It starts at the end of the previous claim or at the committed offset.

    Attributes:
        previous_batch_id: The batch that claimed the range before, while its runs may still process
            the range; empty for none.
        is_early: Whether the previous batch, or without one this batch, was claimed while another
            batch of its streaming run was at work, and is not known to have begun.
    """

    until: int
    batch_id: str
    previous_batch_id: str = ""
    is_early: bool = False

    @property
    def packed(self) -> list[object]:
        """An item of the field `c`."""
        ids = [self.batch_id, *([self.previous_batch_id] if self.previous_batch_id else [])]
        if self.is_early:
            ids[-1] = f"{ids[-1].removesuffix('.1')}.0"
        return [self.until, *ids]


@dataclass(frozen=True, slots=True)
class LastCommit:
    """Batch and run of the last commit.

    If a member crashes between a commit and its record in Dagster, the next owner records the
    commit from these fields.

    Attributes:
        start: The first offset of the commit.
        earlier: The commits before it that may still lack a record, oldest first.
        run_id: The run that succeeded; for a dead letter, the last run that failed.
    """

    start: int
    batch_id: str
    run_id: str
    is_dead_letter: bool = False
    earlier: tuple[LastCommit, ...] = ()

    @property
    def parts(self) -> tuple[LastCommit, ...]:
        """The commits, oldest first. Each ends where the next one starts."""
        return (*self.earlier, replace(self, earlier=()))

    def ends(self, next_offset: int) -> Iterator[tuple[LastCommit, int]]:
        """Return the commits with their ends, for the committed offset of the partition."""
        starts = (part.start for part in self.parts[1:])
        return zip(self.parts, (*starts, next_offset), strict=True)

    @property
    def is_left_out(self) -> bool:
        """Whether the filter of the group leaves out all records of the commit."""
        return self.run_id == LEFT_OUT

    @property
    def packed(self) -> list[object]:
        """The value of a field `l`."""
        return [self.start, self.batch_id, self.run_id, *([1] if self.is_dead_letter else [])]


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """The committed offset of a partition, with its parsed metadata."""

    next_offset: int
    claims: tuple[Claim, ...] = ()
    last_commit: LastCommit | None = None
    log: Log = Log()  # noqa: RUF009 - frozen, so sharing the default is safe

    @property
    def claimed_until(self) -> int:
        """The end of the last claim, or the committed offset."""
        return self.claims[-1].until if self.claims else self.next_offset

    def ranges(self, partition: TopicPartition) -> tuple[tuple[OffsetRange, str], ...]:
        """Return the claimed ranges with their batch ids, sorted by offset."""
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
        body["c"] = [claim.packed for claim in stored.claims]
    last = stored.last_commit
    if last is not None:
        body["l"] = last.packed
    if stored.log.topic_id:
        body["t"] = stored.log.topic_id
    if stored.log.leader_epoch is not None:
        body["e"] = stored.log.leader_epoch
    earlier = "".join(f'"l":{_json(part.packed)},' for part in last.earlier) if last else ""
    text = "{" + earlier + _json(body)[1:]
    metadata = f"dr{_VERSION} {_crc(text)} {text}"
    if len(metadata) > MAX_METADATA_BYTES:
        msg = (
            f"{len(stored.claims)} claims need {len(metadata)} bytes of metadata; "
            f"{MAX_METADATA_BYTES} fit: claim fewer batches"
        )
        raise IllegalStateError(msg)
    return OffsetAndMetadata(stored.next_offset, metadata)


def decode(committed: OffsetAndMetadata) -> StoredPartition:
    """Parse the committed offset and metadata of a partition.

    Raises:
        ClaimError: The metadata is foreign, newer, damaged or was written with another offset.
    """
    text = committed.metadata
    if not text:
        return StoredPartition(committed.offset)
    header = _HEADER.fullmatch(text)
    if header is None:
        raise _unreadable(
            text,
            "was not written by dagster_rebalance: another application commits to this group. Stop "
            "the other application, or give one of the two another group.id",
        )
    version = header["version"]
    if version not in _READABLE:
        raise _unreadable(
            text,
            f"has format version {version}, this release reads versions up to {_VERSION}: upgrade "
            "dagster-rebalance",
        )
    if header["crc"] != _crc(header["body"]):
        raise _unreadable(text, "is damaged: its checksum does not match")
    fields, earlier = _fields(header["body"], _READABLE[version])
    written_beside = committed.offset if version == "1" or fields is None else fields.get("o")
    stored = (
        None
        if fields is None or not _is_whole(written_beside)
        else _parse(committed.offset, fields, earlier)
    )
    if stored is None:
        raise _unreadable(text, "is damaged: it does not have the fields of a claim")
    if written_beside != committed.offset:
        raise _unreadable(
            text,
            f"was committed with offset {written_beside}, but is stored with {committed.offset}: a "
            "tool that copies offsets between clusters, such as MirrorMaker, translated the offset "
            "and copied the metadata unchanged",
        )
    problem = _problem(stored)
    if problem is not None:
        raise _unreadable(text, f"does not fit the committed offset {committed.offset}: {problem}")
    return stored


def _unreadable(text: str, why: str) -> ClaimError:
    return ClaimError(f"the metadata {_excerpt(text)} {why}")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _fields(body: str, known: set[str]) -> tuple[dict[str, Any] | None, list[Any]]:
    """Return the fields and all but the last `l`, or None if it is no object of known fields."""
    try:
        pairs = json.loads(body, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None, []
    if not isinstance(pairs, tuple):
        return None, []
    fields, earlier = dict(pairs), [value for name, value in pairs if name == "l"][:-1]
    is_known = fields.keys() <= known and len(pairs) == len(fields) + len(earlier)
    return fields if is_known else None, earlier


def _parse(offset: int, fields: dict[str, Any], earlier: list[Any]) -> StoredPartition | None:
    try:
        claims = tuple(_claim(*parts) for parts in fields.get("c", ()))
        last = _last(fields["l"], tuple(map(_last, earlier))) if "l" in fields else None
        log = Log(_text(fields.get("t", "")), _whole(fields["e"]) if "e" in fields else None)
    except (ValueError, TypeError):
        return None
    return StoredPartition(offset, claims, last, log)


def _last(packed: Any, earlier: tuple[LastCommit, ...] = ()) -> LastCommit:  # noqa: ANN401 - JSON
    start, batch_id, run_id, *mark = packed
    if mark not in ([], [1]):
        raise ValueError(packed)
    return LastCommit(_whole(start), _text(batch_id), _text(run_id), bool(mark), earlier)


def _claim(until: object, batch_id: object, previous_batch_id: object = "") -> Claim:
    batch, previous = _text(batch_id), _text(previous_batch_id)
    is_early = _EARLY.fullmatch(previous or batch) is not None
    if is_early and previous:
        previous = _first_attempt(previous)
    elif is_early:
        batch = _first_attempt(batch)
    return Claim(_whole(until), batch, previous, is_early)


def _first_attempt(early: str) -> str:
    return f"{early.removesuffix('.0')}.1"


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
        return f"the claims are not in ascending order from the offset: {not_growing[0]}"
    last = stored.last_commit
    commits = last.parts if last is not None else ()
    starts = (-1, *(commit.start for commit in commits), stored.next_offset)
    if any(before >= start for before, start in pairwise(starts)):
        return (
            f"the last commit starts at {starts[-2]}, which is not below the offset "
            f"{stored.next_offset}"
            if len(commits) == 1
            else f"the last commits do not grow up to the offset: {starts[1:]}"
        )
    log = stored.log
    if log.topic_id and not _TOPIC_ID.fullmatch(log.topic_id):
        return f"{_excerpt(log.topic_id)} is not the id of a topic"
    if log.leader_epoch is not None and not 0 <= log.leader_epoch <= _LARGEST_EPOCH:
        return f"{log.leader_epoch} is not a leader epoch"
    identifiers = [claim.batch_id for claim in stored.claims]
    identifiers += [claim.previous_batch_id for claim in stored.claims if claim.previous_batch_id]
    identifiers += [identifier for one in commits for identifier in (one.batch_id, one.run_id)]
    bad = [identifier for identifier in identifiers if not _IDENTIFIER.fullmatch(identifier)]
    return f"{_excerpt(bad[0])} is not an id of a batch or a run" if bad else None


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")  # noqa: PLR2004 - a line of a log
