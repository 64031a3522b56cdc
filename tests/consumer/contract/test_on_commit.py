"""The user's own `on_commit`: it is called beside the member's, and may commit itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.errors import IllegalStateError
from dagster_rebalance.core.partition import OffsetAndMetadata
from tests.consumer.contract.stages import Actor, KafkaStage, MockCluster, play

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka import TopicPartition as ClientsPartition


def test_the_users_own_on_commit_is_called_and_may_commit(mock_cluster: MockCluster) -> None:
    """Waiting is refused in it only while another commit is on its way, since it could never be answered there."""
    stage = KafkaStage(mock_cluster.bootstrap_servers, mock_cluster.topic(), "consumer")
    heard: list[object] = []

    def on_commit(_error: KafkaError | None, partitions: list[ClientsPartition]) -> None:
        heard.append([tp.offset for tp in partitions])
        try:
            heard.append(blue.member.commit({mine: OffsetAndMetadata(9)}).committed)
        except IllegalStateError as refused:
            heard.append("commit_async" in str(refused))

    stage.config["on_commit"] = on_commit  # type: ignore[assignment]
    blue = Actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="an assignment")
    mine = min(blue.owns)
    for number in (1, 2):
        blue.member.commit_async({mine: OffsetAndMetadata(number)})
    assert blue.member.settle(5.0)
    blue.member.close(5.0)
    assert heard == [[1], True, [2], {mine}]
