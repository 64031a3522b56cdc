"""What a schema of a registry is to whoever decodes."""

from __future__ import annotations

from dagster_rebalance.decoding.wire_format import SchemaText


def test_a_schema_is_known_by_its_text_and_all_that_it_refers_to() -> None:
    """What was parsed once is found again by it; a reference that has changed is another schema."""
    alone, again = SchemaText("order"), SchemaText("order", ())
    parsed = {alone: "parsed"}
    assert parsed[again] == "parsed"
    assert SchemaText("order", (("customer", "text"),)) not in parsed
