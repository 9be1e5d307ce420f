"""Tries or plans a training run, explains an error, or lists or converts a checkpoint."""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flatshard.checkpoint.sources import convert, open_source
from flatshard.options.extras import default_extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for bad input, 130 for an interrupt."""
    parser = argparse.ArgumentParser(prog="flatshard", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("inspect", help="list the tensors in a checkpoint")
    one.add_argument("path", help="a file or a folder")
    one.set_defaults(run=lambda options: print(describe(**options)))
    one = commands.add_parser(
        "convert",
        help="write a model's weights in another format",
        description="Convert a file of torch.save or safetensors, or a checkpoint of flatshard, "
        "FSDP1 or FSDP2 (torch.distributed.checkpoint), one tensor at a time.",
    )
    one.add_argument("source", help="a file or a folder")
    one.add_argument("destination", help="model.safetensors, model.pt, or a folder")
    one.add_argument("--key", help="the entry that contains the model, such as app.model")
    one.add_argument("--dtype", help="dtype for floating point tensors, such as bfloat16")
    one.add_argument("--max-shard-size", help="largest size of a safetensors file, such as 5GB")
    one.set_defaults(run=_convert)
    one = commands.add_parser("explain", help="say what an error means, and what to do")
    one.add_argument("code", help="the code at the end of a message, such as FS-DEADLOCK")
    one.set_defaults(run=lambda options: print(explain(**options)))
    if (planning := default_extra("plan")) is not None:
        one = commands.add_parser("plan", help="predict memory and time of each sharding strategy")
        planning.report.add_arguments(one)
        one.set_defaults(run=planning.report.run)
    if (trial := default_extra("trial_run")) is not None:
        one = commands.add_parser(
            "try",
            help="run your script under DDP and under flatshard, and compare",
            description="Run a training script, not a line changed, under "
            "DistributedDataParallel and under flatshard, and compare every step. Exit status: 0 "
            "the same, 1 differs, 2 raises, 3 cannot be compared.",
        )
        trial.add_arguments(one)
        one.set_defaults(run=trial.start)
    options = vars(parser.parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    try:
        return run(options) or 0
    except (ValueError, OSError) as error:
        print(f"flatshard {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"flatshard {command}: interrupted", file=sys.stderr)
        return 130  # the status that shells report for an interrupt


def _convert(options: dict[str, Any]) -> None:
    if (name := options["dtype"]) is not None:
        options["dtype"] = getattr(torch, name, None)
        if not isinstance(options["dtype"], torch.dtype):
            raise ValueError(f"--dtype: expected a dtype such as bfloat16, got {name!r}.")
    convert(**options)


def describe(path: str) -> str:
    """Return a text with the checkpoint's format and step, and a table of its tensors."""
    source = open_source(path)
    source.check_complete()
    lines = [f"{name}: {value}" for name, value in {"format": source.kind, **source.facts}.items()]
    named = {".".join(names): one for names, one in source.tensors.items()}
    width = max(map(len, named), default=0)
    for name, one in named.items():
        dtype = str(one.dtype).removeprefix("torch.")
        lines.append(f"{name:<{width}}  {tuple(one.shape)!s:<20} {dtype:<10} {one.nbytes:>15,}")
    lines += [f"{alias} is {kept}" for alias, kept in source.ties.items()]
    total = sum(one.nbytes for one in named.values())
    return "\n".join([*lines, f"{len(named)} tensors, {total:,} bytes, complete"])


def explain(code: str) -> str:
    """Return the troubleshooting page's text about an error code, with the linked sections."""
    package = Path(__file__).parents[1]
    page = package / "troubleshooting.md"  # a copy in the wheel, see pyproject.toml
    if not page.exists():
        page = package.parent / "docs" / page.name
    text = page.read_text(encoding="utf-8")
    rows = dict(re.findall(r'^\| <a id="(FS-[A-Z-]+)"></a>(.*) \|$', text, re.MULTILINE))
    code = code.strip("[]").upper()
    if code not in rows:
        raise ValueError(f"no code {code!r}. The codes are {', '.join(sorted(rows))}.")
    titles = "code", "message", "what happened", "what to do"
    cells = zip(titles, rows[code].split(" | "), strict=False)
    parts = [textwrap.fill(_plain(f"{title}: {cell}"), 88) for title, cell in cells]
    for anchor in re.findall(r"\]\(#([\w-]+)\)", rows[code]):
        title = anchor.replace("-", r"\W+")
        # A section ends at the next heading (`##`). A single `#` is a comment in an example.
        section = re.search(rf"^##+ (?i:{title})$(?s:.*?)(?=^##|\Z)", text, re.MULTILINE)
        parts += [] if section is None else [_plain(section[0].strip())]
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """Remove anchors and link targets from Markdown, and keep the names of linked pages."""
    text = re.sub(r"<a [^>]+>|</a>", "", text)
    text = re.sub(r"\[([^\]]+)\]\(([\w-]+)\.md[^)]*\)", r"\1 (page \2)", text)
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
