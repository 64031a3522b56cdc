"""State machine of the ownership of one partition by one member, in one epoch.

`TRANSITIONS` has all legal transitions; any other raises and changes nothing. The diagram in
ARCHITECTURE.md is generated from it.
"""

from __future__ import annotations

import enum

from dagster_rebalance.core.model.errors import IllegalStateError


class Phase(enum.Enum):
    """State of an owned partition."""

    RESTORING = "restoring"
    """Assigned; its committed offset, claims and runs are being read. Nothing may be written
    yet."""
    OWNED = "owned"
    """Batches are planned, claimed, requested and committed."""
    STOPPED = "stopped"
    """Owned, but nothing is planned until an operator acts or a batch succeeds after all."""
    DRAINING = "draining"
    """To be released. No work starts; live runs end, and their successes are committed."""
    DRAINED = "drained"
    """No live run or commit is left, or the deadline passed. Waits for the other partitions of its
    hold."""
    RELEASED = "released"
    """Released in order. Final: a new assignment is a new epoch."""
    LOST = "lost"
    """The member was fenced or its session expired. Nothing may be written. Final."""
    SUPERSEDED = "superseded"
    """During a hold, a rebalance assigned the partition to another member. Nothing may be written.
    Final."""

    @property
    def may_plan(self) -> bool:
        """Whether ranges may be claimed and runs requested."""
        return self is Phase.OWNED

    @property
    def is_kept(self) -> bool:
        """Whether the partition is restored and not being released."""
        return self is Phase.OWNED or self is Phase.STOPPED

    @property
    def may_commit(self) -> bool:
        """Whether the member may write the partition's offset."""
        return self.is_kept or self is Phase.DRAINING

    @property
    def is_final(self) -> bool:
        """Whether this epoch is over."""
        return self in {Phase.RELEASED, Phase.LOST, Phase.SUPERSEDED}


class Change(enum.Enum):
    """Input of the state machine."""

    RESTORED = "restored"
    """The committed offset, the claims and their runs are known."""
    DISTRUSTED = "distrusted"
    """Kafka stores another offset than this member last read or wrote, which is read again."""
    STOP_CAUSED = "stop caused"
    """The partition needs an operator to continue."""
    STOP_CLEARED = "stop cleared"
    """The cause of the stop is resolved."""
    GIVE_UP_REQUESTED = "give-up requested"
    """Kafka requested the revoke, or the member is leaving."""
    LOOK_UP_DROPPED = "look-up dropped"
    """The same while the partition is read again: it drains in its previous state."""
    DRAIN_FINISHED = "drain finished"
    """No live run works on the partition, and all successes are committed and recorded, except
    records that are left to the next owner."""
    DEADLINE_PASSED = "deadline passed"
    """The hold reached its limit; the claims stay for the next owner."""
    RELEASE_COMPLETED = "release completed"
    """The revoke is completed in Kafka."""
    LOSS_NOTICED = "loss noticed"
    """The member was fenced, or its session expired."""
    SUPERSESSION_NOTICED = "supersession noticed"
    """Another rebalance ended a hold without a callback."""


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
    """Return the phase after a change.

    Raises:
        IllegalStateError: The change is not legal in this phase.
    """
    following = TRANSITIONS.get((phase, change))
    if following is None:
        msg = f"'{change.value}' cannot happen to a partition that is {phase.value}"
        raise IllegalStateError(msg)
    return following


def diagram() -> str:
    """Return the state machine as a Mermaid diagram."""
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
