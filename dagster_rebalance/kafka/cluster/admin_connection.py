"""The connection of an admin client, and the thread that frees its client.

An admin client converts each response in a thread of its own, where the garbage collector may run.
If the collector frees that client there, librdkafka 2.16 aborts the process, because a thread of a
client must not call `rd_kafka_destroy`. It happens when a consumer is dropped while a request waits
for its response. A connection therefore does not own its client. `_Clients` owns it, and frees it
in a thread that belongs to no client when the connection is gone.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from functools import cache, cached_property
from itertools import count
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient

from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.credentials import Login
from dagster_rebalance.kafka.client.errors import (
    RECENT_ERRORS,
    Operation,
    broker_error,
    root_cause,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings


class AdminConnection:
    """An admin client, created by its first request, and the errors that it reported."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recent_errors: deque[KafkaError] = deque(maxlen=RECENT_ERRORS)

    @property
    def _admin(self) -> AdminClient:
        self._login.renew()
        return self._held.client

    @cached_property
    def _held(self) -> _HeldClient:
        config = {**self._settings.connection(), "error_cb": self._recent_errors.append}
        return _HeldClient(create_client(AdminClient, config))

    @cached_property
    def _login(self) -> Login:
        return Login(self._settings.credentials, weakref.proxy(self._held.client))

    def _drop_client(self) -> None:
        self._held.client.poll(0)  # for its last reported errors
        vars(self).pop("_login", None)
        vars(self).pop("_held", None)

    def _root_cause(self, error: KafkaError) -> KafkaError:
        """Return the reported error that caused a timeout."""
        self._admin.poll(0)
        return root_cause(self._recent_errors, error)

    def _error(
        self, error: KafkaError, operation: str, partitions: Iterable[TopicPartition] = ()
    ) -> BrokerError:
        return broker_error(self._root_cause(error), self._operation(operation), partitions)

    def _operation(self, name: str) -> Operation:
        return Operation(name, self._settings.brokers)


class _HeldClient:
    """A client that is freed in the thread of `_Clients` when this object is."""

    def __init__(self, client: AdminClient) -> None:
        self._clients = _clients_of(os.getpid())
        self._number = self._clients.add(client)
        weakref.finalize(self, self._clients.free, self._number).atexit = False

    @property
    def client(self) -> AdminClient:
        return self._clients.get(self._number)


class _Clients:
    """The admin clients of a process."""

    def __init__(self) -> None:
        self._clients: dict[int, AdminClient] = {}
        self._numbers = count()
        # The collector may call `free` at any time, also within a call of `put`.
        self._unused: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._free_unused, name="admin clients", daemon=True).start()

    def add(self, client: AdminClient) -> int:
        number = next(self._numbers)
        self._clients[number] = client
        return number

    def get(self, number: int) -> AdminClient:
        return self._clients[number]

    def free(self, number: int) -> None:
        self._unused.put(number)

    def _free_unused(self) -> None:
        while True:
            self._clients.pop(self._unused.get())


@cache
def _clients_of(_process: int) -> _Clients:
    """Return the clients of a process: a fork has no thread of its parent."""
    return _Clients()
