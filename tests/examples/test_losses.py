"""The examples when a partition is lost and comes back in one poll, in a group in memory."""

from __future__ import annotations

import asyncio
import runpy
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance import (
    AsyncRebalanceAwareConsumer,
    OffsetAndMetadata,
    RebalanceAwareConsumer,
    TopicPartition,
)
from dagster_rebalance.core.model.errors import RebalanceInProgressError
from dagster_rebalance.core.model.events import LostReason, PartitionsAssigned, PartitionsLost
from dagster_rebalance.kafka.group_ports import CommitResult
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance import OffsetTracker
    from dagster_rebalance.kafka.consumer.consumer import PollResult

EXAMPLES = Path(__file__).parents[2] / "examples"
P0 = TopicPartition("orders", 0)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """An example may install its own handler."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Stage:
    """A partition of twenty records whose ownership changes behind the back of the example."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = FakeGroup({"orders": 1})
        self.log = fake_log(self.group, monkeypatch, {0: 20})
        self.member = Stabilising(self.group)

    @property
    def committed(self) -> int:
        """Return the committed offsets of the group."""
        stored = self.group.committed.get(P0)
        return stored.offset if stored else 0

    def options(self) -> dict[str, Any]:
        """Return the options of a consumer in the group."""
        return {"member": self.member, "cluster": self.group, "clock": self.group.clock}

    def lose_and_get_back(self) -> None:
        """The session ends, another owner commits 5,000, and the partition comes back."""
        self.group.committed[P0] = OffsetAndMetadata(5000)
        self.group.produce(P0, 4985)
        self.member.deliver(PartitionsLost((P0,), LostReason.SESSION))
        self.member.deliver(PartitionsAssigned((P0,)))


class Stabilising(FakeMember):
    """A member whose next commits meet a rebalance."""

    refusals = 0

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Refuse the requested number of commits."""
        if not offsets or not self.refusals:
            return super().commit(offsets)
        self.refusals -= 1
        error = RebalanceInProgressError("the group is stabilising")
        return CommitResult(frozenset(), dict.fromkeys(offsets, error))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage."""
    return Stage(monkeypatch)


def main_of(example: str, **replaced: object) -> Callable[..., Any]:
    """The main function of an example, with other things under some of its names."""
    main = runpy.run_path(str(EXAMPLES / example))["main"]
    main.__globals__.update(replaced)
    return main  # type: ignore[no-any-return]


class Pool:
    """Threads that work when the test allows it."""

    def __init__(self, _threads: int) -> None:
        self._due: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, function: Callable[[Message], object], record: Message) -> None:
        """Work for later."""
        self._due.append(lambda: function(record))

    def do(self, count: int) -> None:
        """Do the oldest work."""
        due, self._due = self._due[:count], self._due[count:]
        for function in due:
            function()

    def shutdown(self) -> None:
        """Finish the remaining work."""
        self.do(len(self._due))


def test_threads_that_finish_late_do_not_commit_older_offsets(stage: Stage) -> None:
    pool, seen = Pool(8), list[int]()

    class Scripted(RebalanceAwareConsumer):
        def poll(self, timeout_s: float | None = None, *_: Any, **__: Any) -> list[Message]:  # noqa: ANN401 - as there
            seen.append(stage.committed)
            if len(seen) == 2:
                stage.lose_and_get_back()
                pool.do(10)
            elif len(seen) == 3:
                signal.raise_signal(signal.SIGINT)
            return super().poll(timeout_s)

    main_of(
        "kip983_loop.py",
        ThreadPoolExecutor=lambda _: pool,
        RebalanceAwareConsumer=lambda config: Scripted(config, **stage.options()),
        work_on=lambda _: None,
    )("unreachable:9092", "orders")
    assert seen == [0, 0, 5000]
    assert stage.committed == 5005
    assert not stage.group.members


class Tasks:
    """The tasks of an example, which continue when the test allows it."""

    def __init__(self) -> None:
        self._may_finish = {False: asyncio.Event(), True: asyncio.Event()}
        self._finished = asyncio.Semaphore(0)

    async def work_on(self, record: Message, tracker: OffsetTracker) -> None:
        """Waits."""
        await self._may_finish[record.offset() in range(10, 20)].wait()
        tracker.done_record(record)
        self._finished.release()

    async def finish_ten(self, *, first: bool) -> None:
        """Let the first or the second half of twenty records be finished."""
        self._may_finish[not first].set()
        for _ in range(10):
            await self._finished.acquire()


def scripted(stage: Stage, before: Mapping[int, Callable[[], Any]]) -> Callable[..., Any]:
    """Consumers for asyncio that do something before some of their polls, counted from 1."""

    class Scripted(AsyncRebalanceAwareConsumer):
        polls = 0

        async def poll_with_rebalance(self, *arguments: Any, **named: Any) -> PollResult:  # noqa: ANN401 - as there
            self.polls += 1
            if self.polls in before:
                await before[self.polls]()
            return await super().poll_with_rebalance(*arguments, **named)

    return lambda config: Scripted(config, **stage.options())


def test_tasks_that_finish_late_do_not_commit_older_offsets(stage: Stage) -> None:
    tasks, seen = Tasks(), list[int]()

    async def lose() -> None:
        stage.lose_and_get_back()
        await tasks.finish_ten(first=True)

    async def stop() -> None:
        seen.append(stage.committed)
        await tasks.finish_ten(first=False)
        signal.raise_signal(signal.SIGINT)

    asyncio.run(
        main_of(
            "asyncio_workers.py",
            AsyncRebalanceAwareConsumer=scripted(stage, {2: lose, 3: stop}),
            work_on=tasks.work_on,
        )("unreachable:9092", "orders")
    )
    assert seen == [5000]
    assert stage.committed == 5005


def test_tasks_continue_after_a_commit_during_a_rebalance(stage: Stage) -> None:
    tasks = Tasks()

    async def refuse() -> None:
        stage.member.refusals = 1
        await tasks.finish_ten(first=True)
        await tasks.finish_ten(first=False)

    async def stop() -> None:
        assert not stage.member.refusals
        assert stage.committed == 20
        signal.raise_signal(signal.SIGINT)

    asyncio.run(
        main_of(
            "asyncio_workers.py",
            AsyncRebalanceAwareConsumer=scripted(stage, {2: refuse, 4: stop}),
            work_on=tasks.work_on,
        )("unreachable:9092", "orders")
    )


class Transactions:
    """A producer; committed transactions count, with their offsets."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self._open: list[str] = []
        self.copies: list[str] = []

    def init_transactions(self, _timeout_s: float) -> None:
        """Nothing to fence."""

    def begin_transaction(self) -> None:
        """Nothing is in it."""
        self._open = []

    def produce(self, _topic: str, copy: str) -> None:
        """One more."""
        self._open.append(copy)

    def send_offsets_to_transaction(
        self, offsets: Collection[Any], _member: object, _timeout_s: float
    ) -> None:
        """Stored at once: no other owner looks."""
        for tp in offsets:
            self._group.committed[TopicPartition(tp.topic, tp.partition)] = OffsetAndMetadata(
                tp.offset
            )

    def commit_transaction(self, _timeout_s: float) -> None:
        """It counts."""
        self.copies += self._open

    def abort_transaction(self, _timeout_s: float) -> None:
        """It does not."""
        self._open = []


def test_copies_of_returned_partitions_start_after_the_other_owner(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, polls = Transactions(stage.group), list[int]()
    monkeypatch.setattr("confluent_kafka.Producer", lambda _config: producer)

    class Scripted(RebalanceAwareConsumer):
        def poll(self, timeout_s: float | None = None, *_: Any, **__: Any) -> list[Message]:  # noqa: ANN401 - as there
            polls.append(stage.committed)
            if len(polls) == 2:
                stage.lose_and_get_back()
            elif len(polls) == 4:
                signal.raise_signal(signal.SIGINT)
            return super().poll(timeout_s)

    main_of(
        "transactions.py",
        RebalanceAwareConsumer=lambda config: Scripted(config, **stage.options()),
        TRANSACTION_S=60.0,
    )("unreachable:9092", "orders", "copies")
    assert producer.copies == [f"orders 0 {offset}" for offset in range(5000, 5005)]
    assert stage.committed == 5005
