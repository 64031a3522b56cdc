"""The files of the documentation site, in the folders of the repository.

A hook of MkDocs (`mkdocs.yml`). The links between README, ARCHITECTURE and `docs/` work on GitHub
and on the site without rewriting.
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
    """Publish the repository's files, and of MkDocs' own files only those of the theme."""
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
