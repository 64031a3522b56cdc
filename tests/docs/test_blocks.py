"""Every fenced block of the documentation is valid; the tests of the pages execute most of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from importlib import import_module
from importlib.metadata import metadata
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from dagster_rebalance.cli.app import COMMANDS, build_app
from dagster_rebalance.cli.target import read_client_config
from proofs.__main__ import COMMANDS as PROOFS
from tests.docs.blocks import ROOT, Block, all_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "example_project/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
BLOCKS = [block for page in PAGES for block in all_blocks(page)]
EXAMPLES = [
    Block(str(path.relative_to(ROOT)), 1, "python", path.read_text(), "")
    for path in sorted((ROOT / "docs").rglob("*.py"))
]
DRAWN = {"mermaid", "text"}
_VARIABLE = re.compile(r"[A-Z_]+=.*")
OTHERS = {
    "cat",
    "cd",
    "dg",
    "docker",
    "export",
    "kafka-acls",
    "kafka-configs",
    "kafka-consumer-groups",
    "mkdir",
    "openssl",
    "psql",
    "touch",
    "uv",
}
"""Programs of others."""
PLATFORMS = {"dagster_aws", "dagster_databricks", "dagster_k8s", "databricks", "kubernetes"}
"""Packages of users that are not installed here. `test_pipes` plays them."""


def of(*languages: str) -> list[Block]:
    """The blocks of some languages."""
    return [block for block in BLOCKS if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """Return the commands of a block as words, without the prefixes of environments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)
        words = list(dropwhile(_VARIABLE.fullmatch, words))
        if words[:1] == ["uvx"]:
            words = words[3:] if words[1] == "--from" else []
        if words[:2] == ["uv", "run"]:
            words = words[2:]
        if words:
            yield words


def test_block_has_a_known_language() -> None:
    assert {"python", "sh", "yaml", "json", "properties"} >= {
        block.language for block in BLOCKS
    } - DRAWN


@pytest.mark.parametrize("block", [*of("python"), *EXAMPLES], ids=str)
def test_python_block_compiles_and_its_imports_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in PLATFORMS:
                continue
            module = import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)


@pytest.mark.parametrize("block", of("yaml", "json", "properties"), ids=str)
def test_data_block_is_parsed(block: Block, tmp_path: Path) -> None:
    if block.language == "yaml":
        assert yaml.safe_load(block.text)
    elif block.language == "json":
        assert json.loads(block.text)
    else:
        file = tmp_path / "login.properties"
        file.write_text(block.text)
        assert read_client_config(file)["bootstrap.servers"]


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_shell_block_is_parsed_and_its_commands_exist(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["bash", "-n", "-c", block.text], check=True)  # noqa: S607 - whatever bash is there
    (tmp_path / "login.properties").touch()
    monkeypatch.chdir(tmp_path)
    for program, *words in commands(block):
        match program:
            case "dagster-rebalance":
                parse(COMMANDS, words)
            case "python":
                assert words[:2] == ["-m", "proofs"]
                parse(PROOFS, words[2:])
            case "make":
                check_make(words)
            case "pip":
                check_extras(words)
            case _:
                assert program in OTHERS, f"{block}: unknown program {program}"


def parse(programs: Mapping[str, str], words: list[str]) -> None:
    """Let the command line itself read the words; nothing is run."""
    app: Any = typer.main.get_command(build_app(programs, words))
    with app.make_context("program", list(words), resilient_parsing=True) as context:
        name, command, rest = app.resolve_command(context, words)
        assert command is not None, f"there is no command {words[0]}"
        command.make_context(name, rest, parent=context)


def check_make(words: list[str]) -> None:
    """Ask make whether it has the target, and find the variables in its file."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, value = word.partition("=")
        if not is_variable:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), word
            continue
        assert f"$({name})" in makefile, word
        if name == "ARGS" and "chaos" in words:
            parse(PROOFS, ["chaos", *shlex.split(value)])
        if name == "ARGS" and "demo" in words:
            parse(PROOFS, ["demo", *shlex.split(value)])


def check_extras(words: list[str]) -> None:
    extras = metadata("dagster-rebalance").get_all("Provides-Extra") or []
    named = {extra for word in words for extra in re.findall(r"[\w-]+", (word + "[").split("[")[1])}
    assert named <= set(extras)
