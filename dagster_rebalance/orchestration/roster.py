"""The roster of a group as tables: who owns what, open holds, and how the last ones ended.

Each event of the group asset carries them, so that the newest one always shows them: nobody has to
observe anything for it while nothing happens.
"""

from __future__ import annotations

import textwrap
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.partition import OffsetRange, named, partitions_named
from dagster_rebalance.core.roster import Kind, Roster, Said, roster
from dagster_rebalance.orchestration.run_links import run_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HISTORY_READ = 200
_READ_AT_ONCE = 200
_NEWEST_READ = 10
"""People may have reported something of their own, without the roster."""
_ROWS_SHOWN = 20
_SHOWN = 300
_HOLD_COLUMNS = ("member", "holds", "since", "waits for")
_KINDS = {kind.value: kind for kind in Kind}


def said_in(description: str, metadata: Mapping[str, Any], at: float) -> Said | None:
    """What an observation of the group asset says; None for an event that is not a member's."""
    kind = _KINDS.get(str(metadata.get("event")))
    if kind is None:
        return None
    return Said(
        kind=kind,
        member=str(metadata.get("incarnation")),
        name=str(metadata.get("code_location")),
        at=at,
        partitions=tuple(partitions_named(metadata.get("partitions"))),
        text=description,
        run_ids=tuple(map(str, _list(metadata.get("runs")))),
        outcome=str(metadata.get("outcome", "")),
        run_id=str(metadata.get("member_run") or ""),
    )


def history_of(
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float | None = None
) -> list[Said]:
    """What the members of a group have said last, oldest first.

    Args:
        instance: Where it is recorded.
        group: The group asset.
        since: How far back to look, in seconds since 1970; None for the newest events alone.
    """
    history = []
    newest = (
        instance.fetch_observations(group, limit=_HISTORY_READ).records
        if since is None
        else list(_observed(instance, group, since))
    )
    for record in reversed(newest):
        event = record.asset_observation
        if event is not None:
            metadata = {name: value.value for name, value in event.metadata.items()}
            history.append(said_in(event.description or "", metadata, record.timestamp))
    return [said for said in history if said is not None]


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
    instance: dg.DagsterInstance, group: dg.AssetKey, since: float
) -> Iterable[dg.EventLogRecord]:
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
            texts.append(f"{said} ({ago_s:.0f} s ago)")
    return tuple(texts)


def _rows(
    metadata: Mapping[str, dg.MetadataValue[Any]], name: str, *columns: str
) -> Iterable[list[object]]:
    """Some columns of a table, as members write it; people report what they like."""
    table = metadata.get(name)
    for row in table.records if isinstance(table, dg.TableMetadataValue) else []:
        if row.data.keys() >= set(columns):
            yield [row.data[column] for column in columns]


def tables_of(instance: dg.DagsterInstance, group: dg.AssetKey, *new: Said) -> dict[str, Any]:
    """The roster of a group as metadata.

    Args:
        instance: Where it is recorded.
        group: The group asset.
        new: What is said now, and not recorded yet.
    """
    return _tables(roster([*history_of(instance, group), *new]))


def _tables(found: Roster) -> dict[str, Any]:
    """The roster as metadata, with links to the runs that it names."""
    holds, receipts = found.holds[:_ROWS_SHOWN], found.receipts
    runs = [run_id for said, _ in holds for run_id in said.run_ids]
    runs += [run_id for said in receipts for run_id in said.run_ids]
    runs += [member.said.run_id for member in found.members if member.said.run_id]
    return {
        "members": _table(
            ("member", "partitions", "owns", "since"),
            (
                (m.said.name, str(len(m.owns)), _short(named(m.owns)), _time(m.said.at))
                for m in found.members[:_ROWS_SHOWN]
            ),
        ),
        "open_holds": _table(
            _HOLD_COLUMNS,
            (
                (said.name, _short(named(left)), _time(said.at), _waits(said.run_ids))
                for said, left in holds
            ),
        ),
        "receipts": _table(
            ("ended", "member", "outcome", "receipt", "runs"),
            (
                (_time(said.at), said.name, said.outcome, _short(said.text), _runs(said.run_ids))
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


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _short(text: str) -> str:
    return textwrap.shorten(text, _SHOWN, placeholder=" ...")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
