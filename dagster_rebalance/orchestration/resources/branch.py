"""Branch deployments of Dagster+ run the code of a pull request beside production, as a preview.

They have production's settings unless somebody gives them others, and so production's consumer
group. Dagster+ sets a variable in each process that it runs for a branch deployment.
"""

from __future__ import annotations

import os

IS_BRANCH = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"


def is_branch_deployment() -> bool:
    """Whether this process belongs to a branch deployment."""
    return os.environ.get(IS_BRANCH, "0") not in {"", "0"}
