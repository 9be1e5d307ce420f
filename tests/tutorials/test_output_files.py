"""What scripts write: refused at once, in one line, where it cannot be; whole, or not there."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from lib import output
from lib.rank_processes import Ranks

from tests.forked_python import PYTHON

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *("benchmark", "compare_strategies", "gpu_check"),
    *("checkpoints", "construction", "offload", "strategies"),
)

pytestmark = pytest.mark.tutorial


@pytest.mark.parametrize("path", ["/dev/null", "missing/out.json", "."])
@pytest.mark.parametrize("script", SCRIPTS)
def test_paths_that_cannot_be_written(
    script: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some wrote there all the same, others after minutes of work, or in a traceback."""
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).parse_args(["--json", path])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: argument --json: not a " in line
    assert path in line


@pytest.mark.parametrize("script", ["optimizers", "support"])
def test_pages_that_cannot_be_written(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were found out when all was measured."""
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, "--page", str(tmp_path / "missing.md")])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: argument --page: no such page" in line


def test_only_a_whole_file_takes_a_files_place(tmp_path: Path) -> None:
    """A device was replaced by a file; a part of one was left by a run that was killed."""
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    path = output.output_file(str(link))
    with output.replacing(path) as part:
        part.write_text("whole")
        if hasattr(os, "O_TMPFILE"):
            assert list(tmp_path.iterdir()) == [link]
    assert link.is_symlink()
    assert target.read_text() == "whole"
    with contextlib.suppress(ValueError), output.replacing(path) as part:
        part.write_text("a part")
        raise ValueError("the cause")
    assert target.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    full = mock.patch.object(Path, "write_text", side_effect=OSError(28, os.strerror(28)))
    with full, pytest.raises(SystemExit) as stopped:
        output.write_json(path, {"a": 1})
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: cannot write {path}: {os.strerror(28)}\n"
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("script", "arguments"), [("structure", ["--unknown"]), ("structure", ["--repo", "missing"])]
)
def test_bad_options_are_one_line(
    script: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert arguments[-1] in line


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_torch_is_loaded(rank: int, tmp_path: Path) -> None:
    """Its C++ ended the process where it could not pass on the exception, in lines of its own."""
    (tmp_path / "torch.py").touch()
    program = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nfinally: os.abort()"
    (tmp_path / "flatshard.py").write_text(program)
    path = f"{tmp_path}:{ROOT / 'scripts'}"
    ended = subprocess.run(
        [sys.executable, "-c", "import lib.prerequisites"],
        env={**os.environ, "PYTHONPATH": path, "LOCAL_RANK": str(rank)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == ("interrupted\n" if rank == 0 else "")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_ranks_end_with_torchrun(tmp_path: Path) -> None:
    """On Ctrl-C it left those that it had just started."""
    for package in ("torch", "flatshard"):
        (tmp_path / f"{package}.py").touch()
    rank = "import lib.prerequisites, time; print(flush=True); time.sleep(60)"
    program = f"""import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "{rank}"], stdout=subprocess.PIPE)
rank.stdout.readline()"""
    path = f"{tmp_path}:{ROOT / 'scripts'}"
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "TORCHELASTIC_RUN_ID": "one"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,  # until nobody has it
        check=True,
        timeout=20,
    )


def test_ctrl_c_leaves_no_server_of_ranks(tmp_path: Path) -> None:
    """It went on loading torch."""
    program = """import lib.prerequisites
from lib import rank_processes
from multiprocessing import forkserver
with rank_processes.Ranks(1) as ranks:
    forkserver.ensure_running()
    print(forkserver._forkserver._forkserver_pid, flush=True)
    raise KeyboardInterrupt"""
    ended = subprocess.run(
        [PYTHON, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
    )
    assert ended.stderr == "interrupted\n"
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_leave_is_removed() -> None:
    """They are killed: of tensors that they had returned, a folder with a socket stayed."""
    with Ranks(1) as ranks:
        (said,) = ranks.run(tempfile.mkdtemp, 1, seconds=60)
    assert said.outcome == "returned"
    assert not Path(said.what).exists()


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    for package in ("torch", "flatshard"):
        (tmp_path / f"{package}.py").touch()
    program = "import lib.prerequisites; raise KeyboardInterrupt"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'scripts'}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "interrupted\n"
