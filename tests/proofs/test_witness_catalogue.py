"""The witness of the catalogue loses no event while Dagster's storage is unavailable."""

from __future__ import annotations

import dagster as dg
import pytest

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from proofs.witness.catalogue import CatalogueReader


def test_events_read_before_a_storage_failure_are_returned_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def locked(*_: object, **__: object) -> None:
        message = "database is locked"
        raise OSError(message)

    with dg.DagsterInstance.ephemeral() as instance:
        Catalogue(
            instance, GroupAssets.of("etl"), MemberIdentity("blue", "sensor", "process-1")
        ).record_joined()
        reader = CatalogueReader(instance, "etl")
        with monkeypatch.context() as away:
            away.setattr(instance, "fetch_materializations", locked)
            with pytest.raises(OSError, match="locked"):
                reader.read()
        assert [event.kind for event in reader.read()] == ["joined"]
        assert reader.read() == []


def test_events_name_each_partition_of_a_span() -> None:
    partitions = [TopicPartition("numbers", number) for number in range(150)]
    with dg.DagsterInstance.ephemeral() as instance:
        identity = MemberIdentity("blue", "sensor", "process-1")
        Catalogue(instance, GroupAssets.of("etl"), identity).record_assigned(partitions, "id-1")
        (event,) = CatalogueReader(instance, "etl").read()
    assert event.partitions == tuple(map(str, partitions))
