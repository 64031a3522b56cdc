"""Pause marks on a real broker, through rebalances of each protocol."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from tests.kafka.readers import CommitOnRevoke, Readers

pytestmark = [
    pytest.mark.broker,
    pytest.mark.parametrize("group", ["consumer", "classic", "range"], indirect=True),
]


def test_pause_survives_rebalances_and_every_record_is_read_once(group: Readers) -> None:
    group.produce(300)
    blue = group.reader(CommitOnRevoke())
    silent = blue.tp(1)
    blue.consumer.pause([silent])
    group.play(lambda: blue.count == 900, blue, what="the records of three partitions")
    blue.consumer.pause_all()
    group.produce(100)
    green = group.reader(CommitOnRevoke())
    green.consumer.pause_pattern(re.compile(".*"))
    group.play(
        lambda: len(green.consumer.assignment()) == len(blue.consumer.assignment()) == 2,
        blue,
        green,
        what="both to have a share",
    )
    green.consumer.close()
    group.play(lambda: len(blue.consumer.assignment()) == 4, blue, what="everything to be back")
    assert (blue.count, green.count) == (900, 0)
    assert blue.consumer.paused() == blue.consumer.assignment()
    blue.consumer.resume_all()
    group.play(lambda: blue.count == 1200, blue, what="the rest of three partitions")
    assert blue.consumer.paused() == {silent}
    assert not blue.offsets[1]
    blue.consumer.resume([silent])
    group.play(
        lambda: blue.count == 1600, blue, what="the records of the partition that was paused"
    )
    assert all(offsets == list(range(400)) for offsets in blue.offsets.values())


def test_mark_and_metadata_are_carried_to_the_next_owner(group: Readers) -> None:
    group.produce(50)
    blue = group.reader(pause_marks="carry")
    group.play(lambda: blue.count == 200, blue, what="the records")
    everything = blue.consumer.assignment()
    blue.consumer.commit_sync(dict.fromkeys(everything, OffsetAndMetadata(50, "the user's")))
    blue.consumer.pause(everything)
    group.produce(50)
    green = group.reader(pause_marks="carry")
    group.play(
        lambda: len(green.consumer.assignment()) == len(blue.consumer.assignment()) == 2,
        blue,
        green,
        what="both to have a share",
    )
    for _ in range(5):
        green.poll()
    owned = green.consumer.assignment()
    assert green.consumer.paused() == owned
    assert green.count == 0
    assert green.consumer.committed(owned) == dict.fromkeys(
        owned, OffsetAndMetadata(50, "the user's")
    )
    green.consumer.resume(owned)
    group.play(lambda: green.count == 100, green, blue, what="the records of the new owner")
    assert blue.count == 200
