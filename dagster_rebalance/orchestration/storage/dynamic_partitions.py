"""Records of a group that are stored as dynamic partition keys without an asset.

Dagster adds such a key without a change of the others, returns all keys in one query and in the
order in which they were added, and never deletes a key. No page and no request of Dagster's API can
change the keys. Observations can be wiped, and key-values lose concurrent writes.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import Action, Directive, superseded
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg


class DirectiveStore:
    """The directives of one group."""

    def __init__(self, instance: dg.DagsterInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def read(self) -> tuple[Directive, ...]:
        """Return all directives that may apply, oldest first."""
        return tuple(map(_read_directive, self._instance.get_dynamic_partitions(self._name)))

    def add(self, directives: Iterable[Directive]) -> None:
        """Add directives."""
        # The time in nanoseconds makes each text unique.
        texts = [
            f"{time.time_ns()} {_to_json(d.action.value, d.partitions, d.by, d.at, d.reason)}"
            for d in directives
        ]
        self._instance.add_dynamic_partitions(self._name, texts)

    def tidy(self, *, before: float = 0.0) -> None:
        """Remove directives that can never apply again, and directives from before a time."""
        texts = self._instance.get_dynamic_partitions(self._name)
        directives = [_read_directive(text) for text in texts]
        expired = {index for index, one in enumerate(directives) if one.at < before}
        for index in sorted(expired.union(superseded(directives))):
            self._instance.delete_dynamic_partition(self._name, texts[index])


class RerunStore:
    """The unfinished rerun batches of one group."""

    def __init__(self, instance: dg.DagsterInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def read(self) -> tuple[RerunBatch, ...]:
        """Return all batches, in the order in which they were requested."""
        return tuple(map(_read_rerun, self._instance.get_dynamic_partitions(self._name)))

    def add(self, batches: Iterable[RerunBatch]) -> None:
        """Add batches."""
        self._instance.add_dynamic_partitions(self._name, list(map(_rerun_text, batches)))

    def remove(self, batches: Iterable[RerunBatch]) -> None:
        """Remove batches; ignore batches that are not stored."""
        for batch in batches:
            self._instance.delete_dynamic_partition(self._name, _rerun_text(batch))


class JobName(NamedTuple):
    """The name of a job, as Dagster gives it in a run.

    The repository is empty for a run that was executed without a code location.
    """

    repository: str
    job: str

    @classmethod
    def of(cls, run: dg.DagsterRun) -> JobName:
        """Return the job of a run."""
        origin = run.remote_job_origin
        return cls(origin.repository_origin.repository_name if origin else "", run.job_name)


class GroupJobs:
    """The jobs of one group, of which the members' sensors request runs.

    A member adds its own job before it reads any run, and no member removes a job, so the runs of a
    former owner with another job are adopted. Runs of any other job are ignored: their tags may be
    copied, or set in the launchpad. The code location is not part of the name: the same job counts
    in all code locations, such as blue and green. Otherwise a renamed location, or a member of
    0.1.0, which adds no job, would have two runs on one range.
    """

    def __init__(
        self, instance: dg.DagsterInstance, group_id: str, own_job: JobName | None
    ) -> None:
        self._instance = instance
        self._name = f"dagster_rebalance/jobs/{hashlib.sha256(group_id.encode()).hexdigest()[:32]}"
        self._own_job = own_job
        self._known: frozenset[str] = frozenset()

    def have(self, run: dg.DagsterRun) -> bool:
        """Whether the job of a run is a job of the group.

        Before the first member, all jobs are, because nothing is committed for the group yet.
        """
        wanted = json.dumps(JobName.of(run))
        if wanted not in self._known:
            self._known = frozenset(self._instance.get_dynamic_partitions(self._name))
        return wanted in self._known or not self._known

    def add_own(self) -> None:
        """Add the member's own job, once.

        Call this method before the first claim: other members find this member's runs by the job.
        """
        if self._own_job is not None:
            self._instance.add_dynamic_partitions(self._name, [json.dumps(self._own_job)])
            self._own_job = None


def _read_directive(text: str) -> Directive:
    try:
        action, partitions, by, at, reason = json.loads(text.partition(" ")[2])
        return Directive(Action(action), str(partitions), str(by), float(at), str(reason))
    except (ConfigurationError, TypeError, ValueError) as error:
        msg = (
            f"the directive {text[:200]!r} cannot be read: a newer version may have written it. "
            "Use that version"
        )
        raise ValueError(msg) from error


def _rerun_text(batch: RerunBatch) -> str:
    rerun = batch.rerun
    return _to_json(
        rerun.rerun_id,
        batch.number,
        rerun.batches,
        rerun.runs_at_once,
        rerun.by,
        rerun.at,
        rerun.reason,
        packed(batch.ranges),
        *filter(None, [rerun.letters]),  # only in replays, so earlier versions read other reruns
    )


def _read_rerun(text: str) -> RerunBatch:
    try:
        rerun_id, number, batches, runs_at_once, by, at, reason, ranges, *letters = json.loads(text)
        rerun = Rerun(
            str(rerun_id),
            str(by),
            str(reason),
            float(at),
            int(runs_at_once),
            int(batches),
            *map(str, letters),
        )
        return RerunBatch(rerun, int(number), unpacked(str(ranges)))
    except (ConfigurationError, TypeError, ValueError) as error:
        msg = (
            f"the rerun batch {text[:200]!r} cannot be read: a newer version may have written it. "
            "Use that version"
        )
        raise ConfigurationError(msg) from error


def _to_json(*fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False)
