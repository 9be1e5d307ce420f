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
BOOSTS = {
    "troubleshooting.md": 20,
    **dict.fromkeys(("api.md", "architecture.md", "evidence.md"), 0.3),
    **dict.fromkeys(("tutorials", "CONTRIBUTING.md", "CHANGELOG.md"), 0.05),
}
"""Weights of pages and folders in the search: errors first, long pages and notebooks last."""


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
    if page.file.src_uri == "index.md":
        markdown = _with_quickstart(markdown)
    if page.file.src_uri == "api.md":
        markdown = "".join(
            map(_with_docstrings, re.split(r"^(?=## )", markdown, flags=re.MULTILINE))
        )
    return markdown.replace("](../", "](")


def _with_quickstart(landing: str) -> str:
    """The landing page with README's installation and quickstart, which have no other page."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    sections = r"^## Install\n.*?^## Quickstart\n.*?(?=^## )"
    quickstart = re.search(sections, readme, re.MULTILINE | re.DOTALL)
    assert quickstart is not None, "README.md has no sections Install and Quickstart"
    before, _, after = landing.partition("## Quickstart\n")
    assert after, "docs/index.md has no section Quickstart"
    _, heading, rest = after.partition("## ")  # leaves out the link that stands for the program
    return before + quickstart[0] + heading + rest


def _with_docstrings(section: str) -> str:
    """A module's section of docs/api.md: its table links to the docstrings, which follow it.

    Of a class only the members that the table has are shown.
    """
    module = section.partition("\n")[0].removeprefix("## ")
    names = re.findall(r"^\| `([\w.]+)", section, re.MULTILINE)
    section = re.sub(r"^\| (`([\w.]+)[()]*`)", rf"| [\1][{module}.\2]", section, flags=re.MULTILINE)
    for name in names:
        if name.rpartition(".")[0] not in names:
            members = [one.rpartition(".")[2] for one in names if one.startswith(f"{name}.")]
            section += f"\n::: {module}.{name}\n    options: {{members: {members or False}}}\n"
    return section


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Set the page's weight in search results."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 1)}
    return html


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Links of notebooks, which are right in the repository, as they are on the site."""
    if not page.file.src_uri.startswith("tutorials/"):
        return output
    output = re.sub(r'<a href="\.\./scripts/[^>]*>(.*?)</a>', r"\1", output)  # not on the site
    output = re.sub(r'href="\.\./docs/([\w-]+)\.md', r'href="../\1.html', output)
    return re.sub(r'href="(\w+)\.ipynb"', r'href="\1.html"', output)
