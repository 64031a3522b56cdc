"""The state machine of the ownership of one partition by one member, in one epoch.

Everything that decides which transitions exist lives here, in `TRANSITIONS`. An event that is not
in the table for a phase is illegal: it raises and nothing changes. The diagram in ARCHITECTURE.md
is generated from the table. What a phase allows (planning, claiming, committing) is asked of the
phase, never of a flag beside it.
"""

from __future__ import annotations

import enum

from dagster_rebalance.core.model.errors import IllegalStateError


class Phase(enum.Enum):
    """What this member may do with a partition."""

    RESTORING = "restoring"
    """Assigned. Its committed offset, its claims and their runs are being looked up; nothing may be
    written yet. Left when they are known, when it has to go again, or when it was lost."""
    OWNED = "owned"
    """Batches are planned, claimed, requested and committed."""
    STOPPED = "stopped"
    """Owned, but nothing new is planned until a person acts: the reason is shown. A batch that
    succeeds after all starts it again."""
    DRAINING = "draining"
    """It has to be given up. No new work starts; live runs are waited for and what succeeds is
    committed."""
    DRAINED = "drained"
    """No live run touches it and nothing is left to commit, or the deadline passed. Waits for the
    other partitions of its hold."""
    RELEASED = "released"
    """Given up in order. Final: a new assignment is a new epoch."""
    LOST = "lost"
    """Taken away by the broker: the member was fenced or its session ended. Nothing may be written.
    Final."""
    SUPERSEDED = "superseded"
    """Given to somebody else by a rebalance that overtook a hold, without a word to us. Nothing may
    be written. Final."""

    @property
    def may_plan(self) -> bool:
        """Whether new ranges may be claimed and runs requested."""
        return self is Phase.OWNED

    @property
    def is_kept(self) -> bool:
        """Whether all is known of it, and nobody has asked for it."""
        return self in {Phase.OWNED, Phase.STOPPED}

    @property
    def may_commit(self) -> bool:
        """Whether the member may write the partition's offset."""
        return self.is_kept or self is Phase.DRAINING

    @property
    def is_final(self) -> bool:
        """Whether this epoch is over."""
        return self in {Phase.RELEASED, Phase.LOST, Phase.SUPERSEDED}


class Change(enum.Enum):
    """What happened to one partition."""

    RESTORED = "restored"
    """The committed offset, the claims and their runs are known."""
    DISTRUSTED = "distrusted"
    """The committed offset or its metadata is not what this member last read or wrote: it is taken
    in again."""
    STOP_CAUSED = "stop caused"
    """It cannot go on without a person."""
    STOP_CLEARED = "stop cleared"
    """What stopped it is resolved."""
    GIVE_UP_REQUESTED = "give-up requested"
    """Kafka requested the revoke, or the member is leaving the group."""
    LOOK_UP_DROPPED = "look-up dropped"
    """The same, while it is taken in again: it is drained by what was known of it before."""
    DRAIN_FINISHED = "drain finished"
    """No live run touches it, and all that succeeded is committed and recorded."""
    DEADLINE_PASSED = "deadline passed"
    """The hold may not wait longer; the claims stay for the next owner."""
    RELEASE_COMPLETED = "release completed"
    """Kafka was told that the revoke is done."""
    LOSS_NOTICED = "loss noticed"
    """The member was fenced, or its session ended."""
    SUPERSESSION_NOTICED = "supersession noticed"
    """A hold was overtaken by another rebalance."""


TRANSITIONS: dict[tuple[Phase, Change], Phase] = {
    (Phase.RESTORING, Change.RESTORED): Phase.OWNED,
    (Phase.RESTORING, Change.STOP_CAUSED): Phase.STOPPED,
    (Phase.RESTORING, Change.GIVE_UP_REQUESTED): Phase.DRAINED,
    (Phase.RESTORING, Change.LOOK_UP_DROPPED): Phase.DRAINING,
    (Phase.OWNED, Change.STOP_CAUSED): Phase.STOPPED,
    (Phase.OWNED, Change.DISTRUSTED): Phase.RESTORING,
    (Phase.OWNED, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.STOPPED, Change.STOP_CLEARED): Phase.OWNED,
    (Phase.STOPPED, Change.DISTRUSTED): Phase.RESTORING,
    (Phase.STOPPED, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.DRAINING, Change.GIVE_UP_REQUESTED): Phase.DRAINING,
    (Phase.DRAINING, Change.DISTRUSTED): Phase.DRAINED,
    (Phase.DRAINING, Change.DRAIN_FINISHED): Phase.DRAINED,
    (Phase.DRAINING, Change.DEADLINE_PASSED): Phase.DRAINED,
    (Phase.DRAINED, Change.GIVE_UP_REQUESTED): Phase.DRAINED,
    (Phase.DRAINED, Change.RELEASE_COMPLETED): Phase.RELEASED,
    **{
        (phase, change): final
        for phase in (Phase.RESTORING, Phase.OWNED, Phase.STOPPED, Phase.DRAINING, Phase.DRAINED)
        for change, final in (
            (Change.LOSS_NOTICED, Phase.LOST),
            (Change.SUPERSESSION_NOTICED, Phase.SUPERSEDED),
        )
    },
}


def after(phase: Phase, change: Change) -> Phase:
    """The phase that follows.

    Raises:
        IllegalStateError: The change cannot happen in this phase.
    """
    following = TRANSITIONS.get((phase, change))
    if following is None:
        msg = f"'{change.value}' cannot happen to a partition that is {phase.value}"
        raise IllegalStateError(msg)
    return following


def diagram() -> str:
    """The state machine as a Mermaid diagram, for the documentation."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (phase, change), following in TRANSITIONS.items():
        if phase is not following:
            arrows.setdefault((phase.name, following.name), []).append(change.value)
    lines = [
        f"    {source} --> {target}: {', '.join(changes)}"
        for (source, target), changes in arrows.items()
    ]
    return "\n".join(
        [
            "stateDiagram-v2",
            "    [*] --> RESTORING",
            *lines,
            *(f"    {p.name} --> [*]" for p in Phase if p.is_final),
        ]
    )
