"""What a schema of a registry is to whoever decodes."""

from __future__ import annotations

from dagster_rebalance.decoding.wire_format import SchemaText


def test_schema_text_equals_by_text_and_references() -> None:
    alone, again = SchemaText("order"), SchemaText("order", ())
    parsed = {alone: "parsed"}
    assert parsed[again] == "parsed"
    assert SchemaText("order", (("customer", "text"),)) not in parsed
