"""The second group, which loses its offsets or its topic until an operator sets the offsets again.

Nothing may be committed before that, and each record of the current topic must be in the output
once. The group has its own code location, which suffers no other fault.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from proofs.chaos.exchange import FLEETING
from proofs.witness.committed import committed_offsets

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment
    from proofs.chaos.exchange import Exchange

TOPIC = GROUP = FLEETING
LOCATION = "amber"
SENSOR = "fleeting_batches_sensor"
RECORDS = 20
_LIMIT_S = 300.0
_REQUEST_S = 15.0
_TEMPTATION_S = 15.0
"""Time to verify that the group does not move without an operator."""


class Fleeting:
    """The second group.

    Attributes:
        problems: Violations, as sentences.
    """

    def __init__(self, kafka: KafkaCluster, dagster: DagsterDeployment, exchange: Exchange) -> None:
        self.problems: list[str] = []
        self._kafka = kafka
        self._dagster = dagster
        self._exchange = exchange
        self._admin = AdminClient(dict(kafka.client_config()))
        self._end = 0
        self._life = 0

    def begin(self) -> None:
        """Create the topic, and start the group."""
        self._make_topic()
        self._produce()
        self._turn_on()
        self._work_off()

    def make_topic_anew(self) -> None:
        """Recreate the topic with fewer records than the committed offset; then set the offset."""
        delete = self._admin.delete_topics
        self._patiently(
            "the topic to be deleted",
            lambda: delete([TOPIC])[TOPIC].result(_REQUEST_S),
            done=KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        self._life += 1
        self._end = 0
        self._make_topic()
        self._produce()
        self._watch_nothing_move()
        self._exchange.turn_page(self._life)
        self._say(0)
        self._work_off()

    def delete_offsets(self) -> None:
        """Delete the group while its sensor is off; then set the offset.

        Kafka does the same after a week without members.
        """
        reached = self._end
        self._patiently(
            "the group to be deleted",
            partial(self._apart, _delete_group),
            done=KafkaError.GROUP_ID_NOT_FOUND,
        )
        self._produce()
        self._turn_on()
        self._watch_nothing_move()
        self._say(reached)
        self._work_off()

    def _make_topic(self) -> None:
        create, topic = (
            self._admin.create_topics,
            NewTopic(TOPIC, num_partitions=1, replication_factor=self._kafka.nodes),
        )
        self._patiently(
            "the topic to be made",
            lambda: create([topic])[TOPIC].result(_REQUEST_S),
            done=KafkaError.TOPIC_ALREADY_EXISTS,
        )

    def _produce(self) -> None:
        producer = Producer({**self._kafka.client_config(), "enable.idempotence": True})
        for number in range(self._end, self._end + RECORDS):
            producer.produce(TOPIC, json.dumps({"number": number}).encode(), partition=0)
        self._end += RECORDS
        if producer.flush(_LIMIT_S):
            msg = f"{TOPIC} did not take its records within {_LIMIT_S:g} s"
            raise DagsterRebalanceError(msg)

    def _say(self, offset: int) -> None:
        """Reset the offset as the check's message says, with the sensors off."""
        self._patiently("the group to take an offset", partial(self._apart, _set_offset, offset))
        self._turn_on()

    def _turn_on(self) -> None:
        self._patiently(
            "the sensor to be turned on", lambda: self._dagster.ui.start_sensor(LOCATION, SENSOR)
        )

    def _apart(self, ask: Callable[..., int | None], *wanted: object) -> None:
        """Send requests to the coordinator in a separate process, with the sensor off.

        The sensor is turned off before each attempt: a tick that ends at that moment writes back
        the status that it had read. librdkafka (2.16, issue 5315 and an assertion in
        rdkafka_queue.h) aborts processes that use an `AdminClient` for a coordinator while brokers
        come and go.
        """
        self._dagster.ui.stop_sensor(LOCATION, SENSOR)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            code = process.submit(ask, dict(self._kafka.client_config()), *wanted).result()
        if code is not None:
            raise KafkaException(KafkaError(code))

    def _watch_nothing_move(self) -> None:
        deadline_at = time.monotonic() + _TEMPTATION_S
        while time.monotonic() < deadline_at:
            committed = self._committed()
            if committed is not None:
                self.problems.append(
                    f"{GROUP} committed {committed} although no operator had set its offset"
                )
                return
            time.sleep(1)

    def _work_off(self) -> None:
        wait_until(
            lambda: self._committed() == self._end,
            timeout_s=_LIMIT_S,
            what=f"{GROUP} to commit {self._end}",
            interval_s=1,
        )
        seen = Counter(self._exchange.page())
        self.problems += [
            f"{TOPIC}: record {number} is lost" for number in range(self._end) if not seen[number]
        ]
        self.problems += [
            f"{TOPIC}: record {number} is doubled" for number, times in seen.items() if times > 1
        ]

    def _committed(self) -> int | None:
        try:
            return committed_offsets(
                self._kafka.client_config(), GROUP, TOPIC, [0], limit_s=_REQUEST_S
            ).get(0)
        except KafkaException:
            return None

    def _patiently(self, what: str, ask: Callable[[], object], *, done: int | None = None) -> None:
        """Repeat a request until it succeeds, or fails with `done`.

        Brokers and the storage are sometimes unavailable, and Kafka refuses a group with members. A
        killed broker may lose the answer of a successful request: the next one then fails with
        `done`.
        """

        def is_done() -> bool:
            try:
                ask()
            except KafkaException as problem:
                return bool(problem.args[0].code() == done)
            except (DagsterRebalanceError, FutureTimeoutError, BrokenProcessPool):
                return False
            return True

        wait_until(is_done, timeout_s=_LIMIT_S, what=what, interval_s=1)


def _delete_group(config: dict[str, str | int | float | bool]) -> int | None:
    """Delete the group, and return the error code."""
    admin = AdminClient(config)  # without a name it would be gone before the answer comes
    return _code_of(admin.delete_consumer_groups([GROUP])[GROUP])


def _set_offset(config: dict[str, str | int | float | bool], offset: int) -> int | None:
    """Commit an offset for the group, and return the error code."""
    wanted = ConsumerGroupTopicPartitions(GROUP, [TopicPartition(TOPIC, 0, offset)])
    admin = AdminClient(config)
    return _code_of(admin.alter_consumer_group_offsets([wanted])[GROUP])


def _code_of(asked: Future[ConsumerGroupTopicPartitions | None]) -> int | None:
    try:
        answer = asked.result(_REQUEST_S)
    except KafkaException as problem:
        return int(problem.args[0].code())
    # The client raises no refusal of a partition.
    errors = (
        [
            partition.error
            for partition in answer.topic_partitions or ()
            if partition.error is not None
        ]
        if answer
        else []
    )
    return int(errors[0].code()) if errors else None
