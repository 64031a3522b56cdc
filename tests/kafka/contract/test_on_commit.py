"""`on_commit` of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from tests.kafka.contract.stages import Actor, KafkaStage, MockCluster, play

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka import TopicPartition as ClientsPartition


def test_on_commit_of_the_settings_is_called_and_may_commit(mock_cluster: MockCluster) -> None:
    stage = KafkaStage(mock_cluster.bootstrap_servers, mock_cluster.topic(), "consumer")
    heard: list[object] = []

    def on_commit(error: KafkaError | None, partitions: list[ClientsPartition]) -> None:
        heard.append((error, [tp.offset for tp in partitions]))
        heard.append(blue.member.commit({mine: OffsetAndMetadata(9)}).committed)

    stage.config["on_commit"] = on_commit  # type: ignore[assignment]
    blue = Actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="an assignment")
    mine = min(blue.owns)
    blue.member.commit_async({mine: OffsetAndMetadata(1)})
    play(lambda: heard, blue, what="the callback")
    blue.member.close(60.0)
    assert heard == [(None, [1]), {mine}]
