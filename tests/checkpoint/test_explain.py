"""``flatshard explain CODE`` prints what the troubleshooting page says, also from a wheel."""

import re
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from flatshard.checkpoint.command_line import explain, main
from tests.harness import ROOT

SOURCES = "".join(path.read_text() for path in sorted((ROOT / "flatshard").rglob("*.py")))
CODES = sorted(set(re.findall(r"\[(FS-[A-Z-]+)\]", SOURCES)))


def test_wheel_contains_the_page() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {
        "docs/troubleshooting.md": "flatshard/troubleshooting.md"
    }
    assert "/docs/troubleshooting.md" in wheel["targets"]["sdist"]["include"]


def test_messages_name_no_page_that_a_wheel_lacks() -> None:
    assert not re.findall(r"docs/[\w-]+\.md", SOURCES)


def test_every_code_of_a_message_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CODES) >= 8
    for code in CODES:
        assert main(["explain", code]) == 0
        text = capsys.readouterr().out
        assert code in text
        assert 10 < len(text.split()) < 1000, text
        assert not re.search(r"\]\(|<a", text)


def test_row_and_linked_sections(capsys: pytest.CaptureFixture[str]) -> None:
    page = (
        "# Page\n\n| code | message | what happened | what to do |\n|---|---|---|---|\n"
        '| <a id="FS-A"></a>`FS-A` | `so` | *this* | [that](a-b.md#c) |\n'
        '| <a id="FS-A-B"></a>`FS-A-B` | no | [see](#a-title) | FS-A |\n\n'
        "## Other\n\n## A title\n\n```python\n# comment\n```\n\n### More\n"
    )
    with mock.patch.object(Path, "read_text", return_value=page):
        row = "code: `FS-A`\n\nmessage: `so`\n\nwhat happened: *this*"
        assert explain("[fs-a]") == f"{row}\n\nwhat to do: that (page a-b)"
        row = "code: `FS-A-B`\n\nmessage: no\n\nwhat happened: see\n\nwhat to do: FS-A"
        section = "## A title\n\n```python\n# comment\n```"
        assert explain("FS-A-B") == f"{row}\n\n{section}"
        assert main(["explain", "FS-X"]) == 2
    said = capsys.readouterr().err
    assert said == "flatshard explain: no code 'FS-X'. The codes are FS-A, FS-A-B.\n"
