"""Adds to the site what lies outside docs/: the notebooks, CONTRIBUTING.md and CHANGELOG.md.

A hook of mkdocs, see mkdocs.yml.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OTHERS = (*sorted(ROOT.glob("tutorials/*.ipynb")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Any, config: Any) -> Any:
    for path in OTHERS:
        uri = path.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that are right in the repository, as they are on the site."""
    if page.file.src_uri in ("CONTRIBUTING.md", "CHANGELOG.md"):
        return re.sub(r"\]\(docs/", "](", markdown)
    return markdown.replace("](../", "](")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Links of notebooks, which are right in the repository, as they are on the site."""
    if not page.file.src_uri.startswith("tutorials/"):
        return output
    output = re.sub(r'<img [^>]*alt="(Open in Colab)"[^>]*>', r"\1", output)  # nothing is fetched
    output = re.sub(r'<a href="\.\./scripts/[^>]*>(.*?)</a>', r"\1", output)  # not on the site
    output = re.sub(r'href="\.\./docs/(\w+)\.md', r'href="../\1.html', output)
    return re.sub(r'href="(\w+)\.ipynb"', r'href="\1.html"', output)
