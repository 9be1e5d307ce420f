"""Trains many architectures with flatshard and FSDP1, and compares them with DDP.

    python scripts/tables/models.py --page docs/evidence.md
    python scripts/tables/models.py --model timm/test_vit transformers/LlamaForCausalLM
    python scripts/tables/models.py --list

Each model of the zoo (`model_zoo/`) trains three steps with SGD and momentum on two gloo ranks,
without dropout, in float64 if the model can run in float64. Losses on each rank and the final state
dict must equal those under DistributedDataParallel. A cell is *right*, *raises* (an error on some
rank), *wrong* (other numbers, and no error), *crashes* or *hangs* (no end within the limit).
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any, NamedTuple

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
from lib.command_line import Parser
from lib.rank_processes import Ranks, Said
from model_zoo.families import FAMILIES, models_of
from model_zoo.trial import POLICIES, train
from table_cells import GOOD, VERDICTS, Cell, Notes, failure, folded, page_file, write_table

WORLD = 2
SIDES = ("flatshard", "fsdp1")
PRELOAD = ("torch.distributed.fsdp",)


class Row(NamedTuple):
    """Results of a model. No ``cells``: DistributedDataParallel could not train the model."""

    name: str
    policy: str
    numel: int
    dtype: str
    cells: dict[str, Cell]
    problem: str = ""


def judge(said: list[Said]) -> Cell:
    """Cell for the outcomes of a training."""
    if failed := failure(said):
        return failed
    why = next((one.what.difference for one in said if one.what.difference), "")
    return Cell("wrong", why) if why else Cell("right")


def try_model(ranks: Ranks, name: str, policy: str, sides: list[str], seconds: float) -> Row:
    """Train a model under DistributedDataParallel, then under each of ``sides``."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as oracle:
        said = ranks.run(train, WORLD, name, "ddp", policy, oracle.name, seconds=seconds)
        bad = [one for one in said if one.outcome != "returned"]
        if bad:
            return Row(name, policy, 0, "", {}, f"{bad[0].outcome}: {bad[0].what}"[:2000])
        first = said[0].what
        cells = {
            side: judge(ranks.run(train, WORLD, name, side, policy, oracle.name, seconds=seconds))
            for side in sides
        }
    return Row(name, policy, first.numel, str(first.dtype).removeprefix("torch."), cells)


# ---------------------------------------------------------------- Markdown


def markdown(rows: list[Row], sides: list[str], command: str) -> str:
    notes = Notes("architectures", longest=90)
    tried = [row for row in rows if row.cells]
    lines = [
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}: `{command}`. The median "
        f"model has {statistics.median_high(row.numel for row in tried):,} parameters.",
        "",
        f"| {len(tried)} architectures | {' | '.join(VERDICTS)} |",
        "|---" * (len(VERDICTS) + 1) + "|",
    ]
    for side in sides:
        counts = Counter(row.cells[side].verdict for row in tried)
        lines.append(f"| {side} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    heads = ["architecture", "parameters", "policy", *sides]
    for family in FAMILIES:
        table, right = [], {policy: [] for policy in POLICIES}
        for row in tried:
            if not row.name.startswith(f"{family}/"):
                continue
            cells = " | ".join(notes.of(row.cells[side]) for side in sides)
            dtype = "" if row.dtype == "float64" else f", {row.dtype}"
            name = row.name.partition("/")[2]
            if {cell.verdict for cell in row.cells.values()} == {"right"}:
                right[row.policy].append(f"`{name}` ({row.numel:,}{dtype})")
            else:
                table.append(f"| `{name}` | {row.numel:,}{dtype} | {row.policy} | {cells} |")
        number = len(table) + sum(map(len, right.values()))
        if table:
            table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *table, ""]
        table += [f"- Right, policy {one}: {', '.join(right[one])}" for one in right if right[one]]
        if number:
            lines += ["", *folded(f"{family}: {number} architectures", table)]
    return "\n".join([*lines, *notes.lines()])


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    families = list(FAMILIES)
    add("--family", nargs="+", choices=FAMILIES, default=families, help="libraries (default: all)")
    add("--model", nargs="+", metavar="NAME", help="models to train (default: all); see --list")
    add("--policy", choices=POLICIES, help="wrap policy of all models (default: by turns)")
    add("--side", nargs="+", choices=SIDES, default=list(SIDES), help="wrappers (default: all)")
    parser.add_timeout(120.0, "a training")
    add("--page", type=page_file, help="write the table into this page instead of printing it")
    add("--list", action="store_true", help="print the names of the models")
    options = parser.parse_args()
    names = [name for family in options.family for name in models_of(family)]
    if options.list:
        print("\n".join(names))
        return 0
    if unknown := sorted(set(options.model or ()) - set(names)):
        parser.error(f"--model: unknown model {unknown[0]}; see --list")
    rows: list[Row] = []
    wanted: list[Any] = options.model or names
    with Ranks(WORLD, preload=(*PRELOAD, *options.family)) as ranks:
        for number, name in enumerate(names):
            if name not in wanted:
                continue
            begin = time.monotonic()
            policy = options.policy or POLICIES[number % len(POLICIES)]
            row = try_model(ranks, name, policy, options.side, options.timeout)
            rows.append(row)
            said = ", ".join(f"{side} {' '.join(row.cells[side])}" for side in row.cells)
            spent = time.monotonic() - begin
            print(f"{name} ({policy}): {said or row.problem} ({spent:.0f} s)", file=sys.stderr)
    command = " ".join(["python scripts/tables/models.py", *sys.argv[1:]])
    write_table(options.page, "architectures", markdown(rows, options.side, command))
    ours = (row.cells.get("flatshard", Cell("right")) for row in rows)
    return int(any(cell.verdict not in GOOD for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
