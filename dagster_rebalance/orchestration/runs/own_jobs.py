"""The jobs whose runs count for a group: those that the sensors of its members request runs of.

Every member adds its own job before it looks at any run, and never takes one away: what a former
owner has at work under another name is adopted. A run of any other job counts for nothing, whatever
its tags say: they can be copied, or written by who may launch runs. The set is kept as dynamic
partitions of no asset, which no page of Dagster and no request of its API can change.

The code location is no part of a job's name: the same job counts in all of them (blue and green,
say). A member of 0.1.0 adds nothing to the set, and a location may be renamed while its runs are at
work; either would get company otherwise.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import dagster as dg


class JobName(NamedTuple):
    """This is the name of a job, as Dagster gives it in a run.

    The repository is empty for a run that was executed in a process of its own.
    """

    repository: str
    job: str

    @classmethod
    def of(cls, run: dg.DagsterRun) -> JobName:
        """The job of a run."""
        origin = run.remote_job_origin
        return cls(origin.repository_origin.repository_name if origin else "", run.job_name)


class OwnJobs:
    """The jobs of one group.

    Args:
        instance: Keeps them.
        group_id: The group.
        mine: The job of the member that asks; None for who is no member.
    """

    def __init__(self, instance: dg.DagsterInstance, group_id: str, mine: JobName | None) -> None:
        self._instance = instance
        self._name = f"dagster_rebalance/jobs/{hashlib.sha256(group_id.encode()).hexdigest()[:32]}"
        self._mine = mine
        self._known: frozenset[str] = frozenset()

    def have(self, run: dg.DagsterRun) -> bool:
        """Whether a run counts.

        Before any member was there, all do: nobody commits anything for them.
        """
        wanted = json.dumps(JobName.of(run))
        if wanted not in self._known:
            self._known = frozenset(self._instance.get_dynamic_partitions(self._name))
        return wanted in self._known or not self._known

    def add_mine(self) -> None:
        """Add the member's own job, once.

        Must come before it claims anything: others find its runs by that.
        """
        if self._mine is not None:
            self._instance.add_dynamic_partitions(self._name, [json.dumps(self._mine)])
            self._mine = None
