"""The code location of the tests of streaming runs: the groups of all of them."""

import dagster as dg

from tests.e2e.project import (
    bad_records_project,
    forms_project,
    pipes_project,
    raising_project,
    rerun_project,
    stream_project,
)

defs = dg.Definitions.merge(
    stream_project.defs,
    forms_project.defs,
    pipes_project.defs,
    rerun_project.defs,
    bad_records_project.defs,
    raising_project.defs,
)
