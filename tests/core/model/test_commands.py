"""Phrases of commands."""

from __future__ import annotations

from typing import get_args

from dagster_rebalance.core.model import commands


def test_each_command_has_a_distinct_phrase() -> None:
    kinds = get_args(commands.Command)
    phrases = [command.doing for command in kinds]
    assert len(set(phrases)) == len(kinds)
    assert not [phrase for phrase in phrases if not phrase.split()[0].endswith("ing")]
