"""The commands of `dagster-rebalance`: their arguments and their help.

Must never import Dagster, confluent-kafka, Spark or rich, so that help is printed at once. The
function of the same name in another module of this folder carries a command out.
"""

from __future__ import annotations

import enum
import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from dagster_rebalance.core.operators.prune_runs import FEWEST_DAYS, MOST_DAYS
from dagster_rebalance.core.runs.rerun_batch import RECORDS_PER_RUN, RUNS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Partitions: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="orders:3 (or orders-3) for a partition, orders for a topic, or a pattern like "
        "'ord*'.",
        show_default=False,
    ),
]
Everything: TypeAlias = Annotated[bool, typer.Option("--all", help="All partitions of the group.")]
Group: TypeAlias = Annotated[
    str, typer.Option(help="The consumer group. Default: the only group of the instance.")
]
By: TypeAlias = Annotated[
    str, typer.Option(help="Your name. Default: your login name.", show_default=False)
]
Reason: TypeAlias = Annotated[
    str, typer.Option("--reason", "-r", help="The reason, shown to others.")
]
BootstrapServer: TypeAlias = Annotated[
    str,
    typer.Option(help="Brokers as host:port. Default: those of the members.", show_default=False),
]
CommandConfig: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A file with librdkafka settings, one name=value per line: brokers and login. "
        "Default: the file that DAGSTER_REBALANCE_COMMAND_CONFIG names.",
        envvar="DAGSTER_REBALANCE_COMMAND_CONFIG",
        show_envvar=False,  # the text would not fit into a terminal with 80 columns
        dir_okay=False,
        exists=True,
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Keys: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(help="The keys of letters, as `letters list` shows them.", show_default=False),
]
LetterTopic: TypeAlias = Annotated[
    str,
    typer.Option(
        "--topic",
        help="The topic of the letters. Default: dead_letter_topic of the group.",
        show_default=False,
    ),
]
Why: TypeAlias = Annotated[str, typer.Option("--why", "-r", help="The reason, shown to others.")]
EachOpen: TypeAlias = Annotated[bool, typer.Option("--all", help="All open letters.")]
Containing: TypeAlias = Annotated[
    str,
    typer.Option(help="Only letters with this text in their reason.", show_default=False),
]


class LettersShown(enum.Enum):
    """The state of the letters that `letters list` shows."""

    OPEN = "open"
    REPLAYED = "replayed"
    DISCARDED = "discarded"
    ALL = "all"


def _carried_out_by(module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the function of the same name in a module of this folder carry out a command."""

    def with_body(declared: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(declared)
        def command(**arguments: Any) -> None:  # noqa: ANN401 - those of the command
            carried_out = import_module(f"dagster_rebalance.cli.{module}")
            getattr(carried_out, declared.__name__)(**arguments)

        return command

    return with_body


@_carried_out_by("local_broker")
def broker(
    nodes: Annotated[int, typer.Option(help="Number of nodes: 1 or 3.")] = 1,
    port: Annotated[
        int | None, typer.Option(help="The first node's port. Default: a free one.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="A topic to create, as NAME or NAME:PARTITIONS. Repeatable."),
    ] = None,
) -> None:
    """Run a local Kafka in a temporary folder until Ctrl-C, for experiments.

    \b
    dagster-rebalance broker --port 9092 --topic orders:8
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("status")
def explain(
    partitions: Annotated[
        list[str] | None,
        typer.Argument(help="As for status, or orders:3@1207 for an offset.", show_default=False),
    ] = None,
    *,
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Explain in sentences what partitions wait for, why they are stopped, and what to do.

    Without arguments: all partitions with lag, claims, runs, a hold or a stop. With an offset, name
    the batch that committed it, and the output of that batch.

    \b
    dagster-rebalance explain orders:3
    dagster-rebalance explain orders:3@1207
    dagster-rebalance explain --group shop
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("letters")
def letters_discard(
    keys: Keys = None,
    *,
    why: Why,
    everything: EachOpen = False,
    containing: Containing = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Discard them.")] = False,
    topic: LetterTopic = "",
    group: Group = "",
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Mark open letters as discarded: nobody will process their records.

    The letters stay in their topic, with your name and the reason. Without --yes, the command only
    shows their number by partition and reason.

    \b
    dagster-rebalance letters discard orders-3-1207 --why "a test order"
    dagster-rebalance letters discard --all --containing "no customer" --why "load test" --yes
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("letters")
def letters_list(
    partitions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only records of orders:3, of the topic orders, or of a pattern like 'ord*'.",
            show_default=False,
        ),
    ] = None,
    *,
    state: Annotated[LettersShown, typer.Option(help="The state.")] = LettersShown.OPEN,
    containing: Containing = "",
    since: Annotated[
        str,
        typer.Option(
            help="Letters stored from this time on: 2026-11-23T14:00 (UTC) or "
            "2026-11-23T14:00+01:00.",
            show_default=False,
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Number of letters to list.")] = 20,
    as_json: AsJson = False,
    topic: LetterTopic = "",
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Count dead letters by partition and reason, and list the newest.

    \b
    dagster-rebalance letters list
    dagster-rebalance letters list orders:3 --containing KeyError --since 2026-11-23
    dagster-rebalance letters list --state all --limit 1000 --json
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("letters")
def letters_replay(
    keys: Keys = None,
    *,
    why: Why,
    everything: EachOpen = False,
    containing: Containing = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start the replay.")] = False,
    runs_at_once: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent runs.")
    ] = RUNS_AT_ONCE,
    topic: LetterTopic = "",
    group: Group = "",
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Process the records of open letters again with the current code.

    The sensor of the group starts the runs, and the group continues. A letter is marked as replayed
    after its run has succeeded. Without --yes, the command only shows the plan.

    \b
    dagster-rebalance letters replay orders-3-1207 --why "fix of 1.4"
    dagster-rebalance letters replay --all --containing KeyError --why "fix of 1.4" --yes
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("letters")
def letters_show(
    key: Annotated[
        str,
        typer.Argument(help="The key of the letter, as `letters list` shows it."),
    ],
    *,
    registry: Annotated[
        str,
        typer.Option(help="URL of a schema registry, to decode the record.", show_default=False),
    ] = "",
    registry_config: Annotated[
        Path | None,
        typer.Option(
            help="A file with settings of SchemaRegistryResource, one name=value per line: url and "
            "login.",
            dir_okay=False,
            exists=True,
            show_default=False,
        ),
    ] = None,
    topic: LetterTopic = "",
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Show a dead letter: its record with key, value and headers, the reason, and its run.

    Without a schema registry, text is shown as text, and other bytes as hexadecimal numbers.

    \b
    dagster-rebalance letters show orders-3-1207
    dagster-rebalance letters show orders-3-1207 --registry http://registry:8081
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("operator_commands")
def pause(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Pause partitions: no new batches start; running batches finish and are committed.

    The partitions stay assigned, and the pause also applies to their next owner.

    \b
    dagster-rebalance pause orders:3 --reason "the warehouse is being moved"
    dagster-rebalance pause orders 'pay*' --group shop --reason "bad deploy upstream"
    dagster-rebalance pause --all --reason "maintenance until 14:00"
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("probe")
def probe(
    offsets: Annotated[
        list[str],
        typer.Argument(
            help="orders:3@1207 for one record, or orders:3@1207-1300 for the offsets from 1207 up "
            "to, and without, 1300.",
            show_default=False,
        ),
    ],
    *,
    module: Annotated[
        str, typer.Option("--module", "-m", help="The module with the Definitions.")
    ] = "",
    python_file: Annotated[
        Path | None,
        typer.Option(
            "--python-file",
            "-f",
            help="The file with the Definitions. Default: the code location in pyproject.toml or "
            "workspace.yaml.",
            dir_okay=False,
            exists=True,
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str, typer.Option(help="The job. Default: the only one that processes the topic.")
    ] = "",
    scratch: Annotated[
        str,
        typer.Option(
            help="The folder for outputs, which is kept: a path or a URI that Spark can write to. "
            "Default: a temporary folder.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Run records through the assets of a group, with outputs in a scratch folder and no commit.

    Prints the metadata of the assets, the rows of each output, the letters that the group would
    have stored, and the error with its traceback; the log goes to stderr. Exit code 1 if the assets
    fail. Only outputs by range of this package are redirected.

    \b
    dagster-rebalance probe orders:3@1207 -m shop.definitions
    dagster-rebalance probe orders:3@1207-1300 --scratch s3a://lake/scratch
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("produce")
def produce(
    topic: Annotated[str, typer.Argument(help="An existing topic.", show_default=False)],
    records: Annotated[int, typer.Argument(min=1, help="Number of records.")] = 1000,
    *,
    keys: Annotated[int, typer.Option(min=1, help="Number of distinct keys.")] = 100,
    bootstrap_server: Annotated[
        str, typer.Option(help="Brokers as host:port.", show_default=False)
    ] = "",
    command_config: CommandConfig = None,
) -> None:
    """Produce JSON orders, keyed by customer, to a topic, for experiments.

    \b
    dagster-rebalance produce orders 1000 --bootstrap-server 127.0.0.1:9092
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("prune")
def prune(
    *,
    days: Annotated[
        int,
        typer.Option(
            min=FEWEST_DAYS,
            max=MOST_DAYS,
            help="Keep runs that ended at most this many days ago.",
        ),
    ] = 30,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the runs. Without it, only show them.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of runs per call.")] = 500,
    group: Group = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Delete old runs of a group from Dagster, with their events.

    Live runs stay, and finished runs that are still needed: by a range that is not committed, by
    the last commit in Kafka, by an unfinished rerun, or as the newest materialization of an asset.
    The materializations of deleted runs disappear from the pages of their assets. Records of
    commits stay.

    \b
    dagster-rebalance prune --days 14
    dagster-rebalance prune --days 14 --limit 2000 --delete
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("operator_commands")
def rerun(
    partitions: Partitions = None,
    *,
    from_offset: Annotated[
        int | None,
        typer.Option(min=0, help="The first offset, for a single partition.", show_default=False),
    ] = None,
    until_offset: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The offset after the last one. Default: the committed offset.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            help="Ranges whose commits were recorded from this time on: 2026-11-23T14:00 (UTC) or "
            "2026-11-23T14:00+01:00.",
            show_default=False,
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            help="Ranges whose commits were recorded before this time. Default: now.",
            show_default=False,
        ),
    ] = "",
    everything: Everything = False,
    reason: Reason = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan, as without --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start the rerun.")] = False,
    runs_at_once: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent runs.")
    ] = RUNS_AT_ONCE,
    records_per_run: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of offsets per run. A larger range has its own run."
        ),
    ] = RECORDS_PER_RUN,
    cancel: Annotated[
        str, typer.Option(help="Cancel the rerun with this id.", show_default=False)
    ] = "",
    group: Group = "",
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Process past ranges again with the current code. Output keyed by range is replaced.

    The group continues, and its committed offsets do not change. Recorded ranges are repeated as a
    whole, with the same bounds. Without arguments, the command lists unfinished reruns.

    \b
    dagster-rebalance rerun orders:3 --from-offset 1200 --until-offset 5000 -r "fix of 1.4"
    dagster-rebalance rerun orders --since 2026-11-23T14:00 --until 2026-11-23T16:00 -r "fix" --yes
    dagster-rebalance rerun --cancel 3f2a91c0
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("reset")
def reset(
    partitions: Partitions = None,
    *,
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="The next offset to read.", show_default=False)
    ] = None,
    to_timestamp: Annotated[
        str,
        typer.Option(
            help="The first record at or after a time: 2026-11-23T02:00 (UTC) or "
            "2026-11-23T02:00+01:00. If there is none, the end of the log.",
            show_default=False,
        ),
    ] = "",
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="The first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="The end of the log.")] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", help="Keep the offset, and drop its metadata.")
    ] = False,
    everything: Everything = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the moves, as without --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Move the offsets.")] = False,
    group: Group = "",
    reason: Reason = "",
    by: By = "",
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """Move the committed offsets of partitions, to read records again or to skip them.

    The group must have no members, and no run may work on the moved partitions. Records that are
    read again are in ranges with different bounds, which replace no existing output: first delete
    the output from the new offset on.

    \b
    dagster-rebalance reset orders:3 --to-offset 1200
    dagster-rebalance reset orders --to-timestamp 2026-11-23T02:00 --yes -r "the fix of 1.4"
    dagster-rebalance reset --all --to-latest --yes --group shop
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("operator_commands")
def resume(
    partitions: Partitions = None,
    *,
    reason: Reason = "",
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Resume partitions after `pause` or `stop`, at their committed offsets.

    \b
    dagster-rebalance resume orders:3
    dagster-rebalance resume --all --reason "the warehouse is back"
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("operator_commands")
def retry(
    partitions: Partitions = None,
    *,
    reason: Reason = "",
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Retry failed ranges now, including those that have stopped their partition.

    The ranges do not wait for the rest of their delay. Partitions that an operator has paused stay
    paused.

    \b
    dagster-rebalance retry orders:3
    dagster-rebalance retry orders 'pay*' --group shop
    dagster-rebalance retry --all --reason "the warehouse is back"
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("status")
def status(
    partitions: Partitions = None,
    *,
    group: Group = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two refreshes.")
    ] = 2.0,
    bootstrap_server: BootstrapServer = "",
    command_config: CommandConfig = None,
) -> None:
    """List partitions with owner, committed offset, lag, and the reason if they are stuck.

    The command reads Kafka and Dagster's storage, so it needs no running member.

    \b
    dagster-rebalance status
    dagster-rebalance status --watch
    dagster-rebalance status orders:3 'pay*' --group shop
    dagster-rebalance status --json | jq '.partitions[] | select(.stopped != "")'
    dagster-rebalance status --command-config login.properties
    """  # noqa: D301 - click does not rewrap the lines after \b


@_carried_out_by("operator_commands")
def stop(
    partitions: Partitions = None,
    *,
    reason: Reason,
    everything: Everything = False,
    group: Group = "",
    by: By = "",
) -> None:
    """Pause partitions, and cancel their running batches.

    A cancelled batch is no failed attempt. After `resume`, it is processed again with the same
    bounds. A run that also processes other partitions is cancelled as a whole, and those partitions
    continue at once.

    \b
    dagster-rebalance stop orders:3 --reason "it writes nonsense"
    """  # noqa: D301 - click does not rewrap the lines after \b
