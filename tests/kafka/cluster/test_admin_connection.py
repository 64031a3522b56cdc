"""A client of a dropped connection is freed in a thread that belongs to no client."""

from __future__ import annotations

import subprocess
import sys

DROPPED = """
import gc, threading, weakref
from confluent_kafka import TopicCollection
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.testing.deadline import wait_until

gc.disable()
collected_in = []
has_collected = threading.Event()

def collect(_):
    gc.collect()
    collected_in.append(threading.current_thread())
    has_collected.set()

cluster = Cluster(validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, hold_limit_s=1))
client = weakref.ref(cluster._admin)
answers = cluster._admin.describe_topics(TopicCollection(["orders"]), request_timeout=0.5)
answers["orders"].add_done_callback(collect)
cluster.cycle = cluster
del cluster, answers
assert client() is not None
assert has_collected.wait(120)
assert collected_in[0] is not threading.main_thread()
wait_until(lambda: client() is None, timeout_s=120, what="the client is freed")
print("freed")
"""


def test_collector_in_a_thread_of_the_client_does_not_end_the_process() -> None:
    played = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=500, check=False
    )
    assert (played.returncode, played.stdout) == (0, "freed\n"), played.stderr
