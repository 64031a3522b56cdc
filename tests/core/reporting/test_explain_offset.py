"""The explanation of one offset, for each place that it can be in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.claims import LEFT_OUT, Claim, LastCommit, StoredPartition, encode
from dagster_rebalance.core.model.offsets import ANY_BOUNDS, Bounds, OffsetAndMetadata
from dagster_rebalance.core.reporting.explain_offset import (
    CommittedOffset,
    MovedOffset,
    OffsetFacts,
    Output,
    explain_offset,
)
from tests.core.world import span, tp

AT = 1_790_000_000.0
STORED = encode(StoredPartition(500, (Claim(600, "s.run-2.9.2"), Claim(700, "b-7"))))
NOTED = encode(StoredPartition(500, (), LastCommit(450, "s.run-2.8.1", "run-2")))
LETTER = encode(StoredPartition(500, (), LastCommit(450, "b-1", "run-2", is_dead_letter=True)))
FILTERED = encode(StoredPartition(500, (), LastCommit(450, LEFT_OUT, LEFT_OUT)))
EARLIER = (
    LastCommit(300, "b-4", "run-0", is_dead_letter=True),
    LastCommit(400, "s.run-1.5.1", "run-1"),
)
PARTS = encode(StoredPartition(500, (), LastCommit(450, "s.run-2.8.1", "run-2", earlier=EARLIER)))
COMMIT = CommittedOffset(span(0, 120, 140), "run-1", "s.run-1.17.1", (17, 17), 1, AT, AT + 60)
FACTS = OffsetFacts(
    tp(0), 125, STORED, Bounds(0, 800), COMMIT, (140, 140), outputs=[Output("shop/orders", AT - 1)]
)
MERGED = replace(COMMIT, range=span(0, 100, 200), numbers=(17, 22), commits=6)
LATE = replace(COMMIT, range=span(0, 100, 200), batch_id="", numbers=(0, 0), commits=None, at=None)
GAP = replace(FACTS, committed=None, recorded=(120, 130), outputs=())
MOVE = MovedOffset(120, 130, AT, "ada")


@pytest.mark.parametrize(
    ("facts", "sentences"),
    [
        (
            FACTS,
            [
                (
                    "orders-0 offset 125: committed by batch 17 of streaming run "
                    "run-1 at 2026-09-21 "
                    "14:13:20 UTC. The range of the batch is [120, 140)"
                ),
                (
                    "key of its output is `orders-0-120-140`, and the Parquet file of "
                    "write_parquet_by_range `topic_partition=orders-p0/120-140.parquet`"
                ),
                "asset shop/orders has a materialization of 2026-09-21 14:13:19 UTC",
            ],
        ),
        (
            replace(FACTS, committed=replace(COMMIT, numbers=(0, 0), batch_id="b-3", at=None)),
            ["committed by run run-1, batch b-3, recorded at 2026-09-21 14:14:20 UTC", "", ""],
        ),
        (
            replace(FACTS, committed=MERGED, outputs=[Output("shop/orders", AT, is_joined=True)]),
            [
                (
                    "committed by one of the batches 17 to 22 of streaming run run-1 at 2026-09-21 "
                    "14:13:20 UTC. The record joins their 6 ranges to [100, 200)"
                ),
                "materialization of 2026-09-21 14:13:20 UTC, with other batches",
            ],
        ),
        (
            replace(FACTS, committed=LATE, outputs=()),
            [
                (
                    "committed by run run-1, recorded at 2026-09-21 14:14:20 UTC. The "
                    "range is one of "
                    "those in [100, 200)"
                ),
                "no materialization of an asset shows its range",
            ],
        ),
        (
            replace(FACTS, committed=LATE, outputs=(), outputs_read=1_500),
            ["", "materialization of an asset shows its range among the 1,500 that were read"],
        ),
        (
            replace(FACTS, outputs=[Output("shop/orders", AT, number=16)]),
            ["", "", "materialization of 2026-09-21 14:13:20 UTC, by batch 16 of the run"],
        ),
        (
            replace(FACTS, committed=replace(LATE, is_run_known=False), outputs=()),
            ["committed by run run-1, or by an earlier run, recorded at 2026-09-21 14:14:20 UTC."],
        ),
        (
            replace(FACTS, has_run=False, outputs=(), bounds=Bounds(300, 800)),
            [
                "committed by batch 17",
                "key of its output",
                "Dagster no longer has run run-1: it was deleted or pruned",
                "Kafka has deleted the record: the log begins at 300",
            ],
        ),
        (
            replace(FACTS, committed=replace(COMMIT, is_dead_letter=True), outputs=()),
            ["in a dead letter. All attempts on [120, 140) failed, last run run-1 at 2026-09-21"],
        ),
        (
            replace(FACTS, committed=replace(COMMIT, run_id=LEFT_OUT, numbers=(0, 0)), outputs=()),
            [
                (
                    "committed without a run at 2026-09-21 14:13:20 UTC: the filter `only` of the "
                    "group leaves out all records of [120, 140)"
                )
            ],
        ),
        (
            replace(GAP, offset=460, stored=FILTERED),
            ["committed without a run: the filter `only` leaves out all records of [450, 500)"],
        ),
        (
            replace(GAP, offset=550),
            [
                (
                    "not committed. batch 9 of streaming run run-2, attempt 2 has "
                    "claimed its range "
                    "[500, 600)"
                )
            ],
        ),
        (replace(GAP, offset=650), ["not committed. batch b-7 has claimed its range [600, 700)"]),
        (
            replace(GAP, offset=750),
            ["not committed, and no batch has claimed it: the group is at offset 500"],
        ),
        (
            replace(GAP, offset=800),
            ["not produced yet: the log ends at 800, and the group is at offset 500"],
        ),
        (
            replace(GAP, offset=5, stored=None, bounds=ANY_BOUNDS),
            ["not committed, and no batch has claimed it: the group has no committed offset"],
        ),
        (
            replace(FACTS, offset=125, stored=OffsetAndMetadata(100)),
            [
                "not committed, and no batch has claimed it: the group is at offset 100",
                (
                    "an operator has moved the committed offset back since an earlier commit: "
                    "committed by batch 17 of streaming run run-1"
                ),
                "key of its output",
                "asset shop/orders",
            ],
        ),
        (
            replace(GAP, offset=460, stored=NOTED),
            [
                (
                    "committed. Dagster has no record yet of [450, 500): its last "
                    "batch is batch 8 of "
                    "streaming run run-2, as Kafka's note of the commit says"
                )
            ],
        ),
        (
            replace(GAP, offset=460, stored=LETTER),
            ["in a dead letter of [450, 500). Dagster has no record of it yet"],
        ),
        (
            replace(GAP, offset=449, stored=PARTS),
            [
                (
                    "committed. Dagster has no record yet of [400, 450): its last batch is batch 5 "
                    "of streaming run run-1, as Kafka's note of the commit says"
                )
            ],
        ),
        (
            replace(GAP, offset=300, stored=PARTS),
            ["in a dead letter of [300, 400). Dagster has no record of it yet"],
        ),
        (replace(GAP, offset=450, stored=PARTS), ["no record yet of [450, 500): its last batch"]),
        (replace(GAP, offset=299, stored=PARTS), ["in no record, although the group has passed"]),
        (
            replace(GAP, moves=[MovedOffset(0, 5, AT, ""), MOVE]),
            [
                (
                    "skipped. The committed offset was moved from 120 to 130 by ada at 2026-09-21 "
                    "14:13:20 UTC"
                )
            ],
        ),
        (
            replace(GAP, moves=[replace(MOVE, by="")]),
            ["moved from 120 to 130 at 2026-09-21 14:13:20 UTC"],
        ),
        (
            GAP,
            [
                (
                    "in no record, although the group has passed it: a record ends at "
                    "120, the next "
                    "one begins at 130. The committed offset was moved externally, or "
                    "the log has no "
                    "records there"
                )
            ],
        ),
        (
            replace(GAP, recorded=(120, None)),
            ["in no record, although the group has passed it: a record ends at 120. The committed"],
        ),
        (
            replace(GAP, recorded=(None, 130)),
            [
                (
                    "before the first record, which begins at 130: the group started "
                    "there, or earlier "
                    "records were wiped in Dagster"
                )
            ],
        ),
        (
            replace(GAP, recorded=(None, None), stored=OffsetAndMetadata(500, "foreign")),
            ["before the committed offset, and Dagster has no record of a commit"],
        ),
    ],
)
def test_explanation_of_an_offset_names_its_place(facts: OffsetFacts, sentences: list[str]) -> None:
    found = explain_offset(facts)
    assert len(found) == len(sentences), found
    for sentence, wanted in zip(found, sentences, strict=True):
        assert wanted in sentence
