"""The files of the documentation site, where they stand in the repository.

A hook of MkDocs (`mkdocs.yml`). README, ARCHITECTURE and their kin stand beside `docs/`, and all of
them link to each other as GitHub shows them. So the site has the folders of the repository, and no
link is rewritten: MkDocs checks them as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ("*.md", "LICENSE", "docs/**/*.*", "examples/*.py")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take what is published from the repository, and of MkDocs' own only what the theme brings."""
    paths = sorted(path for pattern in PUBLISHED for path in ROOT.glob(pattern) if path.is_file())
    published = [
        File(
            str(path.relative_to(ROOT)),
            str(ROOT),
            config.site_dir,
            use_directory_urls=config.use_directory_urls,
        )
        for path in paths
    ]
    return Files([*published, *(file for file in files if file.src_dir != config.docs_dir)])
