"""Scripts refuse an output file at once, in one line, if it cannot be written."""

import importlib

import pytest

pytestmark = pytest.mark.tutorial


@pytest.mark.parametrize("path", ["/dev/null", "missing/out.json", "."])
def test_paths_that_cannot_be_written(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for script in ("benchmark", "compare_strategies", "gpu_check"):
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(script).parse_args(["--json", path])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: argument --json: not a file in an existing directory: {path}" in line
