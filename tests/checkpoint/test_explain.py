"""``flatshard explain CODE`` prints what the troubleshooting page says, also from a wheel."""

import tomllib
from pathlib import Path
from unittest import mock

import pytest

from flatshard.checkpoint.command_line import explain, main
from tests.harness import ROOT


def test_wheel_contains_the_page() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {
        "docs/troubleshooting.md": "flatshard/troubleshooting.md"
    }
    assert "/docs/troubleshooting.md" in wheel["targets"]["sdist"]["include"]


def test_code_in_a_heading_a_row_or_a_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    page = (
        "# Page\n\n| code | what [to do](#x) |\n|---|---|\n"
        "| <a id='FS-A'></a>`FS-A` | *this*, [that](a-b.md#c) |\n"
        "| `FS-A-B` | [see](#a-title) FS-A |\n\n## `FS-C`\n\n```python\n# comment\n```\n\n"
        "### More\n\nFS-D is here.\nAnd here.\n\n## A title\n\nLast.\n"
    )
    with mock.patch.object(Path, "read_text", return_value=page):
        assert explain("[fs-a]") == "code: `FS-A`\n\nwhat to do: *this*, that (page a-b)"
        assert explain("FS-A-B") == "code: `FS-A-B`\n\nwhat to do: see FS-A\n\n## A title\n\nLast."
        assert explain("FS-C") == "## `FS-C`\n\n```python\n# comment\n```"
        assert explain("FS-D") == "FS-D is here.\nAnd here."
        assert main(["explain", "FS-X"]) == 2
    said = capsys.readouterr().err
    assert said == "flatshard explain: no code 'FS-X'. The codes are FS-A, FS-A-B, FS-C, FS-D.\n"
