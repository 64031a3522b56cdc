"""The topics of a group in Dagster's lineage, upstream of the assets that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource


def topic_assets(kafka: KafkaConsumerResource) -> list[dg.AssetSpec]:
    """The topics of a group, as assets that something else writes.

    Groups that read the same topic have equal ones, which Dagster takes for one asset. Those that
    a pattern finds are left out, and one whose name is in an environment variable that is not set
    here.
    """
    given = (topic.get_value() if isinstance(topic, dg.EnvVar) else topic for topic in kafka.topics)
    known = [topic for topic in given if topic]
    names = Topics.of(known).names if known else ()
    return [
        dg.AssetSpec(
            dg.AssetKey(["kafka_topics", topic]),
            description=f"The Kafka topic {topic}.",
            group_name="streaming",
            kinds={"kafka"},
        )
        for topic in names
    ]


def downstream(asset: dg.AssetsDefinition, topics: Sequence[dg.AssetSpec]) -> dg.AssetsDefinition:
    """The same asset with the topics upstream, where Dagster can add them.

    It cannot where the asset takes the value of another: a new dep would replace that input.
    """
    if (
        not asset.is_executable
        or not isinstance(asset.node_def, dg.OpDefinition)
        or any(not taken.dagster_type.is_nothing for taken in asset.node_def.input_defs)
    ):
        return asset
    keys = [topic.key for topic in topics]
    try:
        return asset.map_asset_specs(lambda spec: reading(spec, keys))
    except KeyError:  # its deps were changed after its definition, which Dagster does only once
        return asset


def reading(spec: dg.AssetSpec, topics: Iterable[dg.AssetKey]) -> dg.AssetSpec:
    """An asset with the topics that it reads upstream."""
    known = {dep.asset_key for dep in spec.deps}
    return spec.replace_attributes(deps=[*spec.deps, *(key for key in topics if key not in known)])
