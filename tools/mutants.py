"""This tool makes slips of the hand, one at a time, and tells which no test notices.

The slips are edits in core, orchestration and kafka. The tests are those that need no broker,
Spark, Postgres or deployment. They run once with coverage, then for each edit only those that reach
its lines, in a copy of the project, nearest first. The seed draws the edits, as many of each kind.
`tools/equivalent_mutants.json` lists edits that change nothing anybody could notice, each with its
reason. Run by `make mutants`; ends with 1 when fewer than 95 % of the other edits are noticed.

mutmut and cosmic-ray were looked at: the one draws no sample by seed, the other edits the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from coverage import CoverageData

from tools.mutations import Mutation, mutations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.json"
AREAS = ("core", "orchestration", "kafka")
# The simulator's own mutants are played by tests/proofs/simulation.
TESTS = ("tests/core", "tests/orchestration", "tests/kafka", "tests/scenarios")
QUICK = "not broker and not spark and not e2e and not postgres"
GOAL = 0.95
# A machine that does other work, too, must not make a survivor look slow.
START_S, SLOWNESS = 60.0, 10.0
HANGING_TEST_S = 60
PASSED, FAILED, NO_TESTS = 0, 1, 5


class ToolError(Exception):
    """The run could not test anything."""


@dataclass(frozen=True)
class Reach:
    """Coverage of the tests.

    Attributes:
        tests: The tests that reach a line, by file and line.
        seconds: Duration of each test.
    """

    tests: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def of(self, mutation: Mutation) -> list[str]:
        """The tests that may notice an edit: those named after its module, then quick ones."""
        lines = self.tests.get(mutation.path, {})
        found = {test for line in mutation.lines for test in lines.get(line, ())}
        if not found:  # reached at import, or not at all
            found = {test for tests in lines.values() for test in tests}
        name = Path(mutation.path).stem
        return sorted(
            found,
            key=lambda test: (
                name not in test.partition("::")[0],
                self.seconds.get(test, 0.0),
                test,
            ),
        )


def copied(folder: Path) -> Path:
    """Copy the project, as git sees it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - whichever git
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def played(
    project: Path, *arguments: str, limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest on a copy, which all its processes import before the installed package."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def measured(project: Path, jobs: int) -> Reach:
    """Run the quick tests once with coverage.

    Raises:
        ToolError: Some tests fail without an edit.
    """
    coverage = ("--cov=dagster_rebalance", "--cov-context=test", "--cov-report=")
    done = played(
        project, "-n", str(jobs), "-m", QUICK, "--junitxml=seconds.xml", *coverage, *TESTS
    )
    if done.returncode != PASSED:
        msg = (
            f"these tests do not pass without an edit:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
        raise ToolError(msg)
    return reach_of(project)


def reach_of(project: Path) -> Reach:
    """Read the coverage of a copy."""
    data = CoverageData(str(project / ".coverage"))
    data.read()
    tests: dict[str, dict[int, frozenset[str]]] = {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        reached = {
            line: frozenset(map(test_of, filter(None, contexts)))
            for line, contexts in by_line.items()
        }
        tests[str(Path(file).relative_to(project))] = reached
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ET.parse(project / "seconds.xml").iter("testcase"):  # noqa: S314 - written by our own pytest
        module, name = case.get("classname", "").replace(".", "/"), case.get("name", "")
        seconds[f"{module}.py::{name.partition('[')[0]}"] += float(case.get("time", 0))
    return Reach(tests, seconds)


def test_of(context: str) -> str:
    """The test of a context of coverage, for all its parameters."""
    return re.split(r"[\[|]", context, maxsplit=1)[0]


def drawn(pool: Iterable[Mutation], count: int, seed: int) -> list[Mutation]:
    """Draw equally many edits of each kind, so the most frequent kind does not dominate."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    kinds: defaultdict[str, list[Mutation]] = defaultdict(list)
    for mutation in pool:
        kinds[mutation.kind].append(mutation)
    for of_kind in kinds.values():
        chance.shuffle(of_kind)
    found: list[Mutation] = []
    while len(found) < count and any(kinds.values()):
        found += [of_kind.pop() for of_kind in kinds.values() if of_kind]
    return found[:count]


def is_noticed(mutation: Mutation, project: Path, reach: Reach) -> bool:
    """Return whether a test fails or hangs with the edit.

    Raises:
        ToolError: Pytest itself failed.
    """
    tests = reach.of(mutation)
    if not tests:
        return False
    file = project / mutation.path
    (project / "tests.txt").write_text("\n".join(tests))
    limit_s = START_S + SLOWNESS * sum(reach.seconds.get(test, 0.0) for test in tests)
    file.write_text(mutation.after)
    try:
        done = played(
            project, "-x", "-m", QUICK, f"--timeout={HANGING_TEST_S}", "@tests.txt", limit_s=limit_s
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(mutation.before)
    if done.returncode == NO_TESTS:
        msg = f"no test was found for {mutation.diff}\n{done.stdout[-1000:]}"
        raise ToolError(msg)
    return done.returncode != PASSED


def survivors(sample: Sequence[Mutation], projects: Sequence[Path], reach: Reach) -> list[Mutation]:
    """Play each edit in a copy that is free, and tell how it went."""
    free: SimpleQueue[Path] = SimpleQueue()
    for project in projects:
        free.put(project)

    def play(mutation: Mutation) -> bool:
        project = free.get()
        try:
            return is_noticed(mutation, project, reach)
        finally:
            free.put(project)

    found = []
    with ThreadPoolExecutor(len(projects)) as pool:
        futures = {pool.submit(play, mutation): mutation for mutation in sample}
        for number, future in enumerate(as_completed(futures), 1):
            mutation, noticed = futures[future], future.result()
            verdict = "noticed " if noticed else "SURVIVES"
            print(
                f"{number}/{len(sample)} {verdict} {mutation.path}:{mutation.lines[0]} "
                f"{mutation.kind}",
                flush=True,
            )
            if not noticed:
                found.append(mutation)
                print(mutation.diff, flush=True)
    return found


def main() -> int:
    """Draw, play, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100, help="how many edits")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    arguments = parser.parse_args()
    listed = json.loads(EQUIVALENT.read_text())
    equivalent = {(one["file"], one["line"], one["becomes"]) for one in listed}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        projects = [copied(Path(folder, str(number))) for number in range(arguments.jobs)]
        files = sorted(
            path
            for area in AREAS
            for path in (projects[0] / "dagster_rebalance" / area).rglob("*.py")
        )
        pool = [
            one
            for path in files
            for one in mutations(str(path.relative_to(projects[0])), path.read_text())
        ]
        sample = drawn(
            (one for one in pool if one.key not in equivalent), arguments.mutants, arguments.seed
        )
        print(
            f"{len(sample)} of {len(pool)} edits, seed {arguments.seed}; the tests run once "
            "without one",
            flush=True,
        )
        try:
            left = survivors(sample, projects, measured(projects[0], arguments.jobs))
        except ToolError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    share = 1 - len(left) / len(sample) if sample else 0.0
    for mutation in left:
        print(f"\n{mutation.diff}")
    print(
        f"\n{len(sample) - len(left)} of {len(sample)} edits were noticed ({share:.0%}); the goal "
        f"is {GOAL:.0%}"
    )
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
