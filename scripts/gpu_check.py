"""Checks and times flatshard on this machine's GPUs, in one call of at most eight minutes.

    python scripts/gpu_check.py --json figures.json --trace trace.json

The parts of the check:

nccl     trains on real NCCL ranks, and compares with the unwrapped model. One rank per GPU; if
         there is only one GPU, several ranks share the GPU
gloo     the same with gloo, with tensors on the GPU, or on the CPU if there is no GPU
fake     measures time and memory of a step with a billion parameters in bf16, beside FSDP1, FSDP2
         and the unwrapped model. Simulates rank 0 of eight; collectives move nothing
sync     checks that no operation of a step makes the host wait for the GPU
overlap  profiles one step, and prints the share of the collectives' time in which the GPU computes
diverge  lets one of two ranks do what the other does not: skip a unit, clip alone, raise. All ranks
         must raise an error within 15 seconds, and end without a crash

Each part runs in separate processes with a time limit. A part that hangs or crashes is a line of
the table. On a machine without a GPU, the parts run as far as possible on tiny models, and print
what they skip. The exit status is 0 if no part failed.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_checks.contenders import part_fake
from gpu_checks.divergence import part_diverge
from gpu_checks.equality import part_ranks
from gpu_checks.overlap import part_overlap
from gpu_checks.places import FAIL, NO_GPU, PASS, SKIP, Outcome, Place, in_ranks, one_line
from gpu_checks.waits import part_sync
from lib.command_line import Parser
from lib.output import output_file, write_json


def add_up(rank: int, device: torch.device, place: Place) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    return one.item()


def part_probe(place: Place, args: argparse.Namespace) -> Outcome:
    """Whether the ranks can communicate at all."""
    sums = in_ranks(add_up, place)
    return Outcome(PASS if sums == [place.ranks] * place.ranks else FAIL, f"sums {sums}")


# Limits in seconds. On a GPU, most of the time goes into starting processes and loading libraries.
PARTS: dict[str, tuple[Callable[[Place, argparse.Namespace], Outcome], int]] = {
    "nccl": (part_ranks, 230),
    "gloo": (part_ranks, 110),
    "fake": (part_fake, 150),
    "sync": (part_sync, 60),
    "overlap": (part_overlap, 75),
    "diverge": (part_diverge, 75),
}
PROBE = part_probe, 45


def work(args: argparse.Namespace) -> None:
    """Run one part in this process, and write the outcome to a file for the parent process."""
    part, _ = PARTS.get(args.worker, PROBE)
    place = Place(args.device, args.backend, args.ranks)
    try:
        outcome = part(place, args)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(FAIL, one_line(error))
    args.out.write_text(json.dumps(dataclasses.asdict(outcome)))


def run_part(name: str, place: Place, args: argparse.Namespace, seconds: float) -> Outcome:
    """Run a part in new processes, and kill all of them at the part's time limit."""
    limit = min(PARTS.get(name, PROBE)[1], seconds)
    if limit < 5:
        return Outcome(SKIP, "no time left: raise --minutes")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "outcome.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--worker", name, "--out", str(out)]
        command += ["--device", place.device, "--backend", place.backend]
        command += ["--ranks", str(place.ranks), "--limit", str(limit)]
        command += ["--why-no-nccl", args.why_no_nccl, *(["--quick"] if args.quick else [])]
        command += ["--trace", str(args.trace)] if args.trace else []
        # All ranks are on this machine. Use the loopback interface, because the host's name may not
        # resolve to an address.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "TMPDIR": folder}
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
            try:
                process.wait(limit)
                ended = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"killed at the time limit of {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # kills the part's ranks too
                process.wait()
        outcome = Outcome(**json.loads(out.read_text())) if out.exists() else Outcome(FAIL, ended)
        if outcome.result == FAIL:
            print(f"--- {name}, end of the log:\n{log.read_text()[-4000:]}", file=sys.stderr)
        return outcome


def place_of_part(name: str, args: argparse.Namespace) -> Place | None:
    """Where to run a part; None if the part cannot run on this machine."""
    device = "cuda" if args.gpus else "cpu"
    if name == "gloo":
        return Place(device, "gloo", args.ranks or (4 if args.gpus else 2))
    if name == "fake":
        return Place(device, "fake", 1)
    if name == "diverge":
        # With a backend for the CPU, as in most programs.
        return Place(device, "cpu:gloo,cuda:nccl" if args.nccl_ranks else "gloo", 2)
    if args.nccl_ranks:
        return Place("cuda", "nccl", args.nccl_ranks)
    if name == "nccl":
        return None
    if not args.gpus:
        return Place("cpu", "gloo", 2)
    return Place("cuda", "fake", 1)


def find_nccl(args: argparse.Namespace, left: Callable[[], float]) -> None:
    """Set the number of NCCL ranks that this machine can run; if 0, also set the reason."""
    args.nccl_ranks, args.why_no_nccl = 0, NO_GPU
    if not args.gpus or not {"nccl", "sync", "overlap", "diverge"} & set(args.parts):
        return
    if not dist.is_nccl_available():
        args.why_no_nccl = "this torch has no NCCL"
    elif args.gpus >= 2:
        args.nccl_ranks = args.ranks or min(args.gpus, 8)
    else:
        ranks = args.ranks or 4
        outcome = run_part("probe", Place("cuda", "nccl", ranks), args, left())
        if outcome.result == PASS:
            args.nccl_ranks = ranks
        else:
            args.why_no_nccl = f"NCCL cannot run {ranks} ranks on one GPU: {outcome.text}"


def show(outcomes: dict[str, Outcome]) -> None:
    print(f"\n{'part':8}  {'result':6}  figures")
    for name, outcome in outcomes.items():
        first, *others = outcome.text.splitlines() or [""]
        print(f"{name:8}  {outcome.result:6}  {first}")
        for line in others:
            print(f"{'':8}  {'':6}  {line}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with status 2 if an option is wrong."""
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_names("--parts", PARTS, "parts to run")
    add("--minutes", type=float, default=8, help="time limit for all parts together (default: 8)")
    which = "ranks on one GPU or on the CPU; 0: 4 on a GPU, 2 on the CPU"
    parser.add_number("--ranks", 0, which, low=0)
    add("--quick", action="store_true", help="nccl and gloo: try only FULL_SHARD")
    add("--json", type=output_file, metavar="PATH", help="write all figures to PATH")
    add("--trace", type=output_file, metavar="PATH", help="write the profile of `overlap` to PATH")
    # The script passes these options when it starts itself for a part.
    for name, kind in (("worker", str), ("device", str), ("backend", str), ("limit", float)):
        add(f"--{name}", type=kind, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--why-no-nccl", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if not args.worker and args.ranks == 1:
        parser.error(f"--ranks must be at least 2, got {args.ranks}")
    args.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return args


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    end = time.monotonic() + 60 * args.minutes

    def left() -> float:
        return end - time.monotonic()

    find_nccl(args, left)
    outcomes: dict[str, Outcome] = {}
    for name in [part for part in PARTS if part in args.parts]:
        place = place_of_part(name, args)
        begin = time.monotonic()
        if place is None:
            outcomes[name] = Outcome(SKIP, args.why_no_nccl)
        else:
            outcomes[name] = run_part(name, place, args, left())
        seconds = time.monotonic() - begin
        print(f"{name}: {outcomes[name].result} ({seconds:.0f} s)", flush=True)
    show(outcomes)
    if args.json:
        machine = {"torch": torch.__version__, "gpus": args.gpus, "nccl_ranks": args.nccl_ranks}
        if args.gpus:
            machine["gpu"] = torch.cuda.get_device_name(0)
        parts = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        write_json(args.json, {"machine": machine, "parts": parts})
    if any(outcome.result == FAIL for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
