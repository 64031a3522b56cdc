"""`dagster-rebalance letters`: list, show, replay and discard dead letters.

Reasons, keys and records come from other programs, so they are printed without control characters.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagster_rebalance.cli.declarations import LettersShown
from dagster_rebalance.cli.operator_commands import show_plan
from dagster_rebalance.cli.target import login_name, open_target, read_settings
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import LetterKind, LetterState
from dagster_rebalance.core.model.printable import escaped, one_line
from dagster_rebalance.core.operators.letter_selection import (
    ALL_STATES,
    LetterFilter,
    named_letters,
    newest_first,
)
from dagster_rebalance.core.reporting.open_letters import count_letters
from dagster_rebalance.orchestration.operators.letter_payload import (
    decoded_payload,
    shown_payload,
)
from dagster_rebalance.orchestration.operators.letters import (
    LetterRequest,
    discard,
    plan_discard,
    plan_replay,
)
from dagster_rebalance.orchestration.operators.requests import Reruns, time_of
from dagster_rebalance.orchestration.reporting.member_tables import utc
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.resources.registry import SchemaRegistryResource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dagster_rebalance.core.model.letters import Letter, LetterEntry, LetterFold

_WIDE = 160
_COUNTS_SHOWN = 50
_REASON_SHOWN = 100
_RUN_SHOWN = 8


def letters_discard(
    keys: list[str] | None,
    *,
    why: str,
    everything: bool,
    containing: str,
    yes: bool,
    topic: str,
    group: str,
    by: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Show the letters to discard, and discard them with `yes`."""
    request = LetterRequest(keys or (), everything, containing, by or login_name(), why, topic)
    with open_target(group, bootstrap_server, command_config) as target:
        plan = plan_discard(target.kafka, request)
        typer.echo("\n".join(map(one_line, plan.texts)))
        typer.echo(
            f"{discard(target.instance, target.kafka, plan)}."
            if yes
            else "Nothing was discarded: add --yes to discard them."
        )


def letters_list(
    partitions: list[str] | None,
    *,
    state: LettersShown,
    containing: str,
    since: str,
    limit: int,
    as_json: bool,
    topic: str,
    group: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Print the number of letters by partition and reason, and the newest letters."""
    states = ALL_STATES if state is LettersShown.ALL else frozenset({LetterState(state.value)})
    since_ms = max(0, round(time_of(since) * 1000)) if since else None
    wanted = LetterFilter(partitions or (), containing, since_ms, states)
    with open_target(group, bootstrap_server, command_config) as target:
        letter_topic = DeadLetterTopic(target.kafka, topic)
        fold = letter_topic.read(since_ms=since_ms)
        found = newest_first(filter(wanted.takes, fold.entries.values()))
        if as_json:
            shown = {"topic": letter_topic.name, **_counts(fold), "malformed": fold.malformed}
            typer.echo(json.dumps({**shown, "letters": [*map(_as_json, found[:limit])]}))
        else:
            _print_list(letter_topic.name, fold, found, limit)
            for selector in wanted.unmatched(fold.entries.values()):
                since_then = f" stored since {since}" if since else ""
                typer.echo(f"the topic has no letter of {selector}{since_then}, in any state")


def letters_replay(
    keys: list[str] | None,
    *,
    why: str,
    everything: bool,
    containing: str,
    yes: bool,
    runs_at_once: int,
    topic: str,
    group: str,
    by: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Plan a replay, and begin it with `yes`."""
    request = LetterRequest(keys or (), everything, containing, by or login_name(), why, topic)
    with open_target(group, bootstrap_server, command_config) as target:
        place = (target.instance, target.kafka)
        plan = plan_replay(*place, request, runs_at_once=runs_at_once)
        show_plan(plan)
        typer.echo(
            Reruns(*place).begin(plan) if yes else "Nothing was started: add --yes to start it."
        )


def letters_show(
    key: str,
    *,
    registry: str,
    registry_config: Path | None,
    topic: str,
    group: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> None:
    """Print one letter with its record."""
    resource = _registry(registry, registry_config)
    with open_target(group, bootstrap_server, command_config) as target:
        letter_topic = DeadLetterTopic(target.kafka, topic)
        (entry,) = named_letters(
            letter_topic.read().entries,
            [key],
            topic=letter_topic.name,
            group_id=letter_topic.group_id,
        )
        (letter,) = letter_topic.with_records([entry])
        typer.echo("\n".join(_described(entry, letter)))
        if letter.kind is LetterKind.RECORD:
            for line in _record(letter, resource):
                typer.echo(line)


def _registry(url: str, config: Path | None) -> SchemaRegistryResource | None:
    settings: dict[str, Any] = {**read_settings(config)}
    if url:
        settings["url"] = url
    if not settings:
        return None
    if "url" not in settings:
        msg = f"{config} has no url: add the URL of the schema registry, or pass --registry"
        raise ConfigurationError(msg)
    try:
        return SchemaRegistryResource(**settings)
    except ValueError as error:
        msg = f"the settings of the schema registry are invalid: {error}"
        raise ConfigurationError(msg) from error


def _print_list(topic: str, fold: LetterFold, found: Sequence[LetterEntry], limit: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    counts = ", ".join(f"{number} {state}" for state, number in _counts(fold).items())
    console.print(Text(f"topic {topic}: {counts}", style="bold"))
    if fold.malformed:
        first = one_line(fold.malformed_shown[0])
        are = "record is no letter" if fold.malformed == 1 else "records are no letters"
        console.print(Text(f"{fold.malformed} {are}; {first}"))
    if fold.others:
        belong = "record belongs" if fold.others == 1 else "records belong"
        console.print(Text(f"{fold.others} {belong} to letters of other groups"))
    rows = count_letters(entry.letter for entry in found if entry.letter is not None)
    if not rows:
        console.print(Text("no letter matches"))
        return
    table = _table("partition", "kind", "letters", "reason")
    for row in rows[:_COUNTS_SHOWN]:
        table.add_row(
            *map(Text, (str(row.partition), row.kind.value, str(row.letters), row.reason))
        )
    console.print(table)
    if len(rows) > _COUNTS_SHOWN:
        console.print(Text(f"and {len(rows) - _COUNTS_SHOWN} more reasons"))
    console.print()
    newest = _table("key", "stored", "state", "run", "reason")
    for entry in found[:limit]:
        newest.add_row(*map(Text, _cells(entry)))
    console.print(newest)
    if len(found) > limit:
        console.print(Text(f"and {len(found) - limit} older letters: pass --limit"))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        is_copied = column in {"key", "partition"}
        table.add_column(
            column,
            justify="right" if column == "letters" else "left",
            no_wrap=is_copied,
            overflow="fold",
        )
    return table


def _counts(fold: LetterFold) -> dict[str, int]:
    return {state.value: fold.counts[state] for state in LetterState}


def _cells(entry: LetterEntry) -> Iterator[str]:
    letter = entry.letter
    if letter is not None:
        yield letter.key
        yield _time(letter.time_ms)
        yield entry.state.value
        yield letter.run_id[:_RUN_SHOWN] or "-"
        yield one_line(letter.reason)[:_REASON_SHOWN]


def _time(at_ms: int | None) -> str:
    return "-" if at_ms is None else utc(at_ms / 1000)


def _as_json(entry: LetterEntry) -> dict[str, Any]:
    letter, change = entry.letter, entry.change
    if letter is None:
        return {}
    return {
        "key": letter.key,
        "kind": letter.kind.value,
        **letter.range.fields,
        "state": entry.state.value,
        "reason": letter.reason,
        "time_ms": letter.time_ms,
        "group": letter.group_id,
        "batch": letter.batch_id,
        "run": letter.run_id,
        "attempt": letter.attempt,
        "by": change.by if change else "",
        "why": change.why if change else "",
    }


def _described(entry: LetterEntry, letter: Letter) -> Iterator[str]:
    change = entry.change
    what = "record" if letter.kind is LetterKind.RECORD else "range"
    at = letter.range.start
    where = f"{letter.range.topic_partition} offset {at}" if what == "record" else letter.range
    yield f"letter {letter.key}: the {what} {where}, {entry.state.value}"
    if change is not None:
        by_run = f" in run {change.run_id}" if change.run_id else ""
        why = f": {one_line(change.why)}" if change.why else ""
        by = f"{entry.state.value} by {one_line(change.by)} at {_time(change.time_ms)}"
        yield f"{by}{by_run}{why}"
    group = f" by group {one_line(letter.group_id)}" if letter.group_id else ""
    batch = f", batch {one_line(letter.batch_id)}" if letter.batch_id else ""
    attempt = "" if letter.attempt is None else f", attempt {letter.attempt}"
    yield f"stored: {_time(letter.time_ms)}{group}{batch}{attempt}"
    if letter.run_id:
        run_id = one_line(letter.run_id)
        yield f"run: {run_id} (in Dagster's UI: /runs/{run_id})"
    yield f"reason: {escaped(letter.reason)}"


def _record(letter: Letter, resource: SchemaRegistryResource | None) -> Iterator[str]:
    """Return the record. Without a registry, nothing is decoded."""
    yield f"timestamp: {_time(letter.timestamp_ms)}"
    if letter.headers:
        yield "headers:"
        for name, value in letter.headers:
            yield f"  {escaped(name)}: {shown_payload(value)}"
    parts: tuple[tuple[Literal["key", "value"], bytes | None], ...] = (
        ("key", letter.record_key),
        ("value", letter.value),
    )
    if resource is None:
        for part, payload in parts:
            yield f"{part}: {shown_payload(payload)}"
        return
    names, down = [name for name, _ in letter.headers], ""
    with closing(resource.registry()) as registry:
        for part, payload in parts:
            try:
                value, problem = (
                    (None, down)
                    if down and payload is not None
                    else decoded_payload(registry, part, payload, letter.range.topic, names)
                )
            except BrokerError as error:
                value, problem = None, escaped(str(error))
                down = problem  # each request would wait for it again
            if problem:
                yield f"{part}: {shown_payload(payload)}"
                yield f"  not decoded: {problem}"
            else:
                text = json.dumps(value, default=str, ensure_ascii=False, indent=2)
                yield f"{part}: {escaped(text)}"
