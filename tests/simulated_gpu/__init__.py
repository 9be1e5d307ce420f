"""A GPU that is not there: torch's CUDA code and process groups run, streams are threads.

`runtime.cpp`, `driver.cpp` and `nccl.cpp` are loaded before CUDA's own libraries. What is torch's
stays real: its caching allocator, streams and events, `ProcessGroupNCCL` with its watchdog,
autograd's thread for the device. What kernels would compute, `kernels.py` computes on the CPU when
their stream comes to them, which may be much later: streams beside the one that computes can be
told to take their time (``SIMULATED_SIDE_DELAY``, microseconds for all that is put into them), and
so can that one (``SIMULATED_MAIN_DELAY``). A wait that lacks, or memory that is given away too
early, shows as wrong numbers. What a kernel or a collective costs, it cannot tell.

Needs a C++ compiler, and a torch for CUDA with the headers that its packages bring.
"""

import os
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
PACKAGES = Path(torch.__file__).parents[1] / "nvidia"


def _find_headers() -> list[Path]:
    version = (torch.version.cuda or "").split(".")[0]
    return [PACKAGES / f"cu{version}" / "include", PACKAGES / "nccl" / "include"]


def what_is_missing() -> str:
    """Why there can be no such GPU here; empty if there can."""
    if torch.cuda.is_available():
        return "there is a real one"
    if torch.version.cuda is None:
        return "this torch is not for CUDA"
    if shutil.which("g++") is None:
        return "there is no C++ compiler"
    missing = [str(path) for path in _find_headers() if not path.is_dir()]
    return f"there is no {missing[0]}" if missing else ""


def build(folder: Path) -> dict[str, str]:
    """Compile it; returns what a process needs in its environment to have one."""
    runtime, driver = folder / "libsimulated.so", folder / "libcuda.so.1"
    flags = ["g++", "-O0", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC"]
    includes = [f"-I{path}" for path in (HERE / "include", *_find_headers())]
    sources = [HERE / "runtime.cpp", HERE / "nccl.cpp"]
    subprocess.run([*flags, *includes, "-o", runtime, *sources, "-ldl", "-lpthread"], check=True)
    subprocess.run([*flags, "-o", driver, HERE / "driver.cpp"], check=True)
    return {
        **os.environ,
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "SIMULATED_NCCL_FOLDER": str(folder),
    }
