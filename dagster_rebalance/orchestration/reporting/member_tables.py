"""The member tables: owners, open holds and receipts, as metadata of each event of a group asset.

Every event includes the tables, so the newest event always shows the current state, and no
observation is needed while nothing changes.
"""

from __future__ import annotations

import textwrap
import time
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.offsets import (
    OffsetRange,
    names_of,
    parse_listed,
    parse_partitions,
)
from dagster_rebalance.core.reporting.group_status import (
    Kind,
    MemberRecord,
    SensorState,
    member_table,
)
from dagster_rebalance.orchestration.storage.failure_notes import text_of_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_RECORDS_KEPT = 200
_READ_AT_ONCE = 200
_EVENTS_READ = 2_000
"""The number of events in the first read of a history, which takes half a second."""
_NEWEST_READ = 10
"""The newest event may be of another origin, without the tables."""
_SENSOR_EVENTS_READ = 200
_TICKS_READ = 5
_ROWS_SHOWN = 20
_SHOWN = 300
_LINKS_SHOWN = 8
_HOLD_COLUMNS = ("member", "holds", "since", "waits for")
_KINDS = {kind.value: kind for kind in Kind}


def record_in(description: str, metadata: Mapping[str, Any], at: float) -> MemberRecord | None:
    """Return the member event in an observation; None if a member did not report it."""
    kind = _KINDS.get(str(metadata.get("event")))
    if kind is None:
        return None
    return MemberRecord(
        kind=kind,
        member=str(metadata.get("incarnation")),
        name=member_name(metadata),
        at=at,
        partitions=tuple(parse_listed(metadata.get("partitions"))),
        text=description,
        run_ids=tuple(map(str, _list(metadata.get("runs")))),
        outcome=str(metadata.get("outcome", "")),
        run_id=str(metadata.get("member_run") or ""),
    )


def member_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of the member that has reported an event of the group."""
    return str(metadata.get("member") or metadata.get("code_location"))


class History:
    """The newest member events of a group, cached by one process.

    Earlier events stay in the cache, so a long series of dead letters, which are also events of the
    group, removes no member from the tables.
    """

    def __init__(self, instance: dg.DagsterInstance, group: dg.AssetKey) -> None:
        self._instance = instance
        self._group = group
        self._events: dict[int, MemberRecord] = {}
        self._read_to = -1

    def read(self) -> dict[int, MemberRecord]:
        """Read the events since the last call; return the newest ones by storage id, in order."""
        found, read_to = dict(self._events), self._read_to
        for read, record in enumerate(_observed(self._instance, self._group), 1):
            read_to = max(read_to, record.storage_id)
            event = _event_of(record)
            if event is not None:
                found[record.storage_id] = event
            # An event with a lower id may become visible after one with a higher id, so the newest
            # ones are always read again.
            is_known = read >= _READ_AT_ONCE and record.storage_id <= self._read_to
            if is_known or read >= _EVENTS_READ:
                break
        self._events = dict(sorted(found.items())[-_RECORDS_KEPT:])
        self._read_to = read_to
        return self._events


def records_since(
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float, most: int
) -> tuple[list[MemberRecord], float]:
    """Return the member events since a time, and the time from which they are complete.

    Args:
        instance: The instance with the events.
        group: The group asset.
        since: The time, in seconds since 1970.
        most: The maximum number of events to read, newest first.

    Returns:
        The events, oldest first, and `since` or the time of the oldest event that was read.
    """
    records = list(islice(_observed(instance, group, since), most + 1))
    if len(records) > most:
        records.pop()
        since = records[-1].timestamp
    return [
        event for record in reversed(records) if (event := _event_of(record)) is not None
    ], since


def _event_of(record: dg.EventLogRecord) -> MemberRecord | None:
    event = record.asset_observation
    if event is None:
        return None
    metadata = {name: value.value for name, value in event.metadata.items()}
    return record_in(event.description or "", metadata, record.timestamp)


def skips_of(instance: dg.DagsterInstance, group: dg.AssetKey, since: float) -> list[OffsetRange]:
    """Return the offsets that operators have skipped since a time, in seconds since 1970."""
    return [
        OffsetRange(one.topic, one.partition, before, after)
        for record in _observed(instance, group, since)
        for name, before, after in _moves(record.asset_observation)
        for one in parse_partitions([name])
        if 0 <= before < after
    ]


def _observed(
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float | None = None
) -> Iterable[dg.EventLogRecord]:
    """Yield the events of a group, newest first, read in pages."""
    wanted = dg.AssetRecordsFilter(group, after_timestamp=since)
    cursor = None
    while True:
        found = instance.fetch_observations(wanted, limit=_READ_AT_ONCE, cursor=cursor)
        yield from found.records
        if not found.has_more:
            return
        cursor = found.cursor


def _moves(event: dg.AssetObservation | None) -> Iterable[tuple[str, int, int]]:
    """Yield the moves of an event: the partition, and the offsets before and after."""
    moves = event.metadata.get("moves") if event is not None else None
    if isinstance(moves, dg.JsonMetadataValue) and isinstance(moves.value, dict):
        for name, moved in moves.value.items():
            match moved:
                case [int(before), int(after)]:
                    yield name, before, after
                case _:  # anyone may report to the asset
                    pass


def last_report(
    instance: dg.DagsterInstance, group: dg.AssetKey, lag: dg.AssetKey, now: float
) -> tuple[str, ...]:
    """Return messages from the last report of the members on their group.

    Args:
        instance: The instance with the events.
        group: The group asset.
        lag: The lag asset.
        now: The time, in seconds since 1970.
    """
    events = [
        record.asset_observation
        for record in instance.fetch_observations(group, limit=_NEWEST_READ).records
        if record.asset_observation is not None
    ]
    newest = next((event.metadata for event in events if "members" in event.metadata), {})
    texts = [f"{member} owns {owns}" for member, owns in _rows(newest, "members", "member", "owns")]
    texts += [
        f"{member} holds {held} since {since}, for {what}"
        for member, held, since, what in _rows(newest, "open_holds", *_HOLD_COLUMNS)
    ]
    for record in instance.fetch_observations(lag, limit=1).records:
        if record.asset_observation is not None:
            text, ago_s = record.asset_observation.description, now - record.timestamp
            texts.append(f"as of {ago_s:.0f} s ago: {text}")
    return tuple(texts)


def _rows(
    metadata: Mapping[str, dg.MetadataValue[Any]], name: str, *columns: str
) -> Iterable[list[object]]:
    """Yield these columns of a table, and skip rows of another form."""
    table = metadata.get(name)
    for row in table.records if isinstance(table, dg.TableMetadataValue) else []:
        if row.data.keys() >= set(columns):
            yield [row.data[column] for column in columns]


def tables_of(history: Iterable[MemberRecord]) -> dict[str, Any]:
    """Return the member tables and links to their runs as metadata; `history` is oldest first."""
    found = member_table(history)
    holds, receipts = found.holds[:_ROWS_SHOWN], found.receipts
    runs = [run_id for event, _ in holds for run_id in event.run_ids]
    runs += [run_id for event in receipts for run_id in event.run_ids]
    runs += [member.first.run_id for member in found.members if member.first.run_id]
    return {
        "members": _table(
            ("member", "partitions", "owns", "since"),
            (
                (m.first.name, str(len(m.owns)), _short(names_of(m.owns)), utc(m.first.at))
                for m in found.members[:_ROWS_SHOWN]
            ),
        ),
        "open_holds": _table(
            _HOLD_COLUMNS,
            (
                (event.name, _short(names_of(left)), utc(event.at), _waits(event.run_ids))
                for event, left in holds
            ),
        ),
        "receipts": _table(
            ("ended", "member", "outcome", "receipt", "runs"),
            (
                (utc(event.at), event.name, event.outcome, _short(event.text), _runs(event.run_ids))
                for event in receipts
            ),
        ),
        **run_links(runs),
    }


def run_links(run_ids: Iterable[str]) -> dict[str, dg.DagsterRunMetadataValue]:
    """Return links to the first few runs: Dagster shows no links in the cells of a table."""
    first = islice(dict.fromkeys(run_ids), _LINKS_SHOWN)
    return {f"run {run_id[:8]}": dg.MetadataValue.dagster_run(run_id) for run_id in first}


def sensors_of(instance: dg.DagsterInstance, group: dg.AssetKey) -> tuple[SensorState, ...]:
    """Return the sensors that have run members of a group, by name.

    If a code location does not load, its sensors stay in the storage, but have no ticks.
    """
    known = _sensors_named(instance, group)
    seen = {}
    for state in instance.all_instigator_state():
        repository = state.origin.repository_origin
        location = repository.code_location_origin.location_name
        if (location, state.instigator_name) not in known:
            continue
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=_TICKS_READ)
        ended = next((tick for tick in ticks if tick.status.value != "STARTED"), None)
        seen[state.instigator_name] = SensorState(
            name=state.instigator_name,
            is_on=state.is_running,
            silent_for_s=time.time() - ticks[0].timestamp if ticks else None,
            error=text_of_info(ended.error) if ended and ended.error else "",
        )
    return tuple(seen[name] for name in sorted(seen))


def _sensors_named(instance: dg.DagsterInstance, group: dg.AssetKey) -> set[tuple[str, str]]:
    """Return the code locations and sensors in the events of a group.

    In events of earlier versions, a streaming run has the name of its job in place of the sensor.
    """
    found = set()
    for record in instance.fetch_observations(group, limit=_SENSOR_EVENTS_READ).records:
        metadata = record.asset_observation.metadata if record.asset_observation else {}
        sensor = metadata.get("sensor") or metadata.get("started_by")
        if sensor is not None and "code_location" in metadata:
            location = str(metadata["code_location"].value).partition("/")[0]
            name = str(sensor.value)
            found |= {(location, name), (location, f"{name}_sensor")}
    return found


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
    """Return a time as `2026-11-23 14:00:00 UTC`."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _short(text: str) -> str:
    return textwrap.shorten(text, _SHOWN, placeholder=" ...")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
