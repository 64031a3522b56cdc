"""The roster of a group as tables: who owns what, open holds, and how the last ones ended.

Each event of the group asset carries them, so that the newest one always shows them: nobody has to
observe anything for it while nothing happens.
"""

from __future__ import annotations

import textwrap
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.offsets import OffsetRange, named, partitions_named
from dagster_rebalance.core.reporting.members import Kind, MemberRecord, member_table
from dagster_rebalance.orchestration.reporting.run_links import run_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SAID_KEPT = 200
_READ_AT_ONCE = 200
_EVENTS_READ = 2_000
"""How far a process looks back for what members have said when it reads a history first: this takes
half a second."""
_NEWEST_READ = 10
"""People may have reported something of their own, without the roster."""
_ROWS_SHOWN = 20
_SHOWN = 300
_HOLD_COLUMNS = ("member", "holds", "since", "waits for")
_KINDS = {kind.value: kind for kind in Kind}


def said_in(description: str, metadata: Mapping[str, Any], at: float) -> MemberRecord | None:
    """What an observation of the group asset says; None for an event that is not a member's."""
    kind = _KINDS.get(str(metadata.get("event")))
    if kind is None:
        return None
    return MemberRecord(
        kind=kind,
        member=str(metadata.get("incarnation")),
        name=member_name(metadata),
        at=at,
        partitions=tuple(partitions_named(metadata.get("partitions"))),
        text=description,
        run_ids=tuple(map(str, _list(metadata.get("runs")))),
        outcome=str(metadata.get("outcome", "")),
        run_id=str(metadata.get("member_run") or ""),
    )


def member_name(metadata: Mapping[str, Any]) -> str:
    """The name of the member that has reported an event of the group."""
    return str(metadata.get("member") or metadata.get("code_location"))


class History:
    """What the members of a group have said last, as one process has read it.

    It remembers what it has read: the next dead letters, each an event of the group as well, take
    no member out of the roster.

    Args:
        instance: Where it is recorded.
        group: The group asset.
    """

    def __init__(self, instance: dg.DagsterInstance, group: dg.AssetKey) -> None:
        self._instance = instance
        self._group = group
        self._said: dict[int, MemberRecord] = {}
        self._read_to = -1

    def read(self) -> list[MemberRecord]:
        """Read what is new; what the members have said last is the answer, oldest first."""
        found, read_to = dict(self._said), self._read_to
        for read, record in enumerate(_observed(self._instance, self._group), 1):
            read_to = max(read_to, record.storage_id)
            said = _said(record)
            if said is not None:
                found[record.storage_id] = said
            # An event with a lower id may become visible after one with a higher id, so the newest
            # ones are always read again.
            is_known = read >= _READ_AT_ONCE and record.storage_id <= self._read_to
            if is_known or read >= _EVENTS_READ:
                break
        self._said = dict(sorted(found.items())[-_SAID_KEPT:])
        self._read_to = read_to
        return list(self._said.values())


def said_since(
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float, most: int
) -> tuple[list[MemberRecord], float]:
    """What the members of a group have said since a time, and the time from which all was read.

    Args:
        instance: Where it is recorded.
        group: The group asset.
        since: The time, in seconds since 1970.
        most: How many events to read; with more of them, the oldest are left out.

    Returns:
        What was said, oldest first, and `since`, or the time of the oldest event that was read.
    """
    records = list(islice(_observed(instance, group, since), most + 1))
    if len(records) > most:
        records.pop()
        since = records[-1].timestamp
    return [said for record in reversed(records) if (said := _said(record)) is not None], since


def _said(record: dg.EventLogRecord) -> MemberRecord | None:
    event = record.asset_observation
    if event is None:
        return None
    metadata = {name: value.value for name, value in event.metadata.items()}
    return said_in(event.description or "", metadata, record.timestamp)


def skips_of(instance: dg.DagsterInstance, group: dg.AssetKey, since: float) -> list[OffsetRange]:
    """What people have skipped by moving committed offsets forward.

    Args:
        instance: Where it is recorded.
        group: The group asset.
        since: How far back to look, in seconds since 1970.
    """
    return [
        OffsetRange(one.topic, one.partition, before, after)
        for record in _observed(instance, group, since)
        for name, before, after in _moves(record.asset_observation)
        for one in partitions_named([name])
        if 0 <= before < after
    ]


def _observed(
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float | None = None
) -> Iterable[dg.EventLogRecord]:
    """The events of a group, newest first, read in pages."""
    wanted = dg.AssetRecordsFilter(group, after_timestamp=since)
    cursor = None
    while True:
        found = instance.fetch_observations(wanted, limit=_READ_AT_ONCE, cursor=cursor)
        yield from found.records
        if not found.has_more:
            return
        cursor = found.cursor


def _moves(event: dg.AssetObservation | None) -> Iterable[tuple[str, int, int]]:
    """The moves that an event records, each with the offsets before and after it."""
    said = event.metadata.get("moves") if event is not None else None
    if isinstance(said, dg.JsonMetadataValue) and isinstance(said.value, dict):
        for name, moved in said.value.items():
            match moved:
                case [int(before), int(after)]:
                    yield name, before, after
                case _:  # people report what they like
                    pass


def told_last(
    instance: dg.DagsterInstance, group: dg.AssetKey, lag: dg.AssetKey, now: float
) -> tuple[str, ...]:
    """What the members have shown last of their group, in a few sentences.

    Args:
        instance: Where it is recorded.
        group: The group asset.
        lag: The lag asset.
        now: The time, in seconds since 1970.
    """
    texts = []
    events = [
        record.asset_observation
        for record in instance.fetch_observations(group, limit=_NEWEST_READ).records
        if record.asset_observation is not None
    ]
    newest = next((event.metadata for event in events if "members" in event.metadata), {})
    texts += [
        f"{member} owns {owns}" for member, owns in _rows(newest, "members", "member", "owns")
    ]
    texts += [
        f"{member} holds {held} since {since}, for {what}"
        for member, held, since, what in _rows(newest, "open_holds", *_HOLD_COLUMNS)
    ]
    for record in instance.fetch_observations(lag, limit=1).records:
        if record.asset_observation is not None:
            said, ago_s = record.asset_observation.description, now - record.timestamp
            texts.append(f"as of {ago_s:.0f} s ago: {said}")
    return tuple(texts)


def _rows(
    metadata: Mapping[str, dg.MetadataValue[Any]], name: str, *columns: str
) -> Iterable[list[object]]:
    """Some columns of a table, as members write it; people report what they like."""
    table = metadata.get(name)
    for row in table.records if isinstance(table, dg.TableMetadataValue) else []:
        if row.data.keys() >= set(columns):
            yield [row.data[column] for column in columns]


def tables_of(history: Iterable[MemberRecord]) -> dict[str, Any]:
    """The roster of a group as metadata, with links to the runs that it names.

    Args:
        history: What its members have said, oldest first.
    """
    found = member_table(history)
    holds, receipts = found.holds[:_ROWS_SHOWN], found.receipts
    runs = [run_id for said, _ in holds for run_id in said.run_ids]
    runs += [run_id for said in receipts for run_id in said.run_ids]
    runs += [member.first.run_id for member in found.members if member.first.run_id]
    return {
        "members": _table(
            ("member", "partitions", "owns", "since"),
            (
                (m.first.name, str(len(m.owns)), _short(named(m.owns)), utc(m.first.at))
                for m in found.members[:_ROWS_SHOWN]
            ),
        ),
        "open_holds": _table(
            _HOLD_COLUMNS,
            (
                (said.name, _short(named(left)), utc(said.at), _waits(said.run_ids))
                for said, left in holds
            ),
        ),
        "receipts": _table(
            ("ended", "member", "outcome", "receipt", "runs"),
            (
                (utc(said.at), said.name, said.outcome, _short(said.text), _runs(said.run_ids))
                for said in receipts
            ),
        ),
        **run_links(runs),
    }


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table(
        [dg.TableRecord(dict(zip(columns, row, strict=True))) for row in rows],
        dg.TableSchema(columns=[dg.TableColumn(column) for column in columns]),
    )


def _runs(run_ids: Iterable[str]) -> str:
    return _short(", ".join(run_id[:8] for run_id in run_ids))


def _waits(run_ids: tuple[str, ...]) -> str:
    return f"run{'s' * (len(run_ids) > 1)} {_runs(run_ids)}" if run_ids else "Dagster or Kafka"


def utc(at: float) -> str:
    """A time as people read it."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _short(text: str) -> str:
    return textwrap.shorten(text, _SHOWN, placeholder=" ...")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
