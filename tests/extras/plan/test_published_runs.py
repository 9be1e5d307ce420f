"""`scripts/tables/published_runs.py` judges a file of runs, and says what is wrong with a file."""

import csv
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_runs
import pytest
import torch
from published.fsdp import Fsdp2Replay
from published.layers import freed_at_last_use, held_by_collectives
from published.rows import CUDNN, FLEX, TRITON, Run

from flatshard.extras.plan.hardware import COLLECTIVE_SHARE
from flatshard.extras.plan.trace import Alloc, Event, Free, Mark, Op, StepTrace

ROW = {
    "source": "own runs",
    "url": "",
    "model": "tiny Llama",
    "params_b": "0.01",
    "layers": "6",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "2",
    "ffn": "128",
    "vocab": "256",
    "gpus": "8",
    "gpu_type": "A100-80GB",
    "strategy": "FSDP2 (ZeRO-3)",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "local_batch": "2",
    "seq_len": "256",
    "ac": "full",
    "compile": "False",
    "param_dtype": "fp32 shards, bf16 gathered",
    "reduce_dtype": "fp32",
    "optimizer": "AdamW fp32 states",
    "peak_gib": "0.1",
    "tokens_per_s_per_gpu": "1000",
    "mfu": "",
    "notes": "peak RESERVED",
}


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["published_runs.py", *arguments])
    published_runs.main()


def _file(path: Path, *rows: dict[str, str]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_rows_are_predicted_and_one_speed_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = {**ROW, "ac": "none", "tokens_per_s_per_gpu": "", "seq_len": "1024"}
    runs = _file(tmp_path / "a.csv", ROW, longer, {**ROW, "gpu_type": "abacus"})
    _main(monkeypatch, runs, "--json", str(tmp_path / "a.json"))
    assert "not predicted: unknown GPU abacus" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    first, second, third = found["rows"]
    assert first["predicted_tokens_per_s"] == pytest.approx(1000)  # the only row with a speed
    assert second["active_gib"] > first["active_gib"]  # all activations are saved
    assert first["reserved_gib"] >= first["active_gib"]
    assert third["not_predicted"] == "unknown GPU abacus"
    assert found["summary"]["wrongly predicted not to fit"] == 0


def _traced(row: dict[str, str]) -> StepTrace:
    run = published_runs.read_row(row)
    assert isinstance(run, Run)
    return published_runs.traced(run.form, run.batch, False, torch.float32, torch.float32).trace


def _most_alive(trace: StepTrace, nbytes: int) -> int:
    """Return how many blocks of ``nbytes`` are alive at the same time, at most."""
    alive = most = 0
    for event in trace.events:
        if isinstance(event, Alloc | Free) and trace.sizes[event.block] == nbytes:
            alive += 1 if isinstance(event, Alloc) else -1
            most = max(most, alive)
    return most


def test_a_sharded_loss_holds_one_more_tensor_of_logits() -> None:
    logits = 4 * 2 * 256 * 1024  # float32: batch, length, vocabulary
    row = {**ROW, "vocab": "1024"}
    assert _most_alive(_traced(row), logits) == 3
    assert _most_alive(_traced({**row, "tp": "2"}), logits // 2) == 4


def test_a_head_that_computes_the_loss_in_chunks_never_holds_all_logits() -> None:
    row = {**ROW, "vocab": "4096", "local_batch": "3", "source": "torchtitan 2026-04-10"}
    later = {**row, "source": "torchtitan 2026-05-10"}
    logits = 3 * 256 * 4096  # batch, length, vocabulary
    held = [max(_traced(one).sizes) for one in (row, later)]
    assert held == [4 * logits, 4 * logits // 8]
    # The gradients of the head's weight are added up in float32.
    assert _most_alive(_traced(later), 4 * 4096 * 64) == 1


def test_the_graph_trainer_computes_the_loss_in_chunks_later() -> None:
    row = {**ROW, "strategy": "graph trainer (SimpleFSDP)"}
    losses = [
        published_runs.read_row({**row, "source": f"torchtitan {date}"}).form.loss
        for date in ("2026-05-10", "2026-06-20")
    ]
    assert losses == ["after", "chunked head"]


def test_flex_attention_skips_other_documents() -> None:
    row = {**ROW, "source": "torchtitan 2025-10-15", "seq_len": "8192"}
    flex = {**row, "notes": "FlexAttention"}
    plain, masked = (published_runs.read_row(one).attention_speeds for one in (row, flex))
    assert masked[0] > 4 * plain[0]
    assert (
        masked
        == published_runs.read_row({**row, "source": "torchtitan 2026-06-20"}).attention_speeds
    )
    # A sequence that is not longer than a document is attended completely.
    assert published_runs.read_row({**flex, "seq_len": "512"}).attention_speeds == FLEX


@pytest.mark.parametrize(
    ("gpu", "per_gpu"),
    [("A100-80GB, 200Gbps", 200), ("A100-80GB, 400Gbps", 50), ("H100-80GB, 400Gbps", 400)],
)
def test_a_rate_above_that_of_pcie_is_the_rate_of_a_node(gpu: str, per_gpu: int) -> None:
    run = published_runs.read_row({**ROW, "gpu_type": gpu})
    assert run.machine.link == pytest.approx(0.8 * per_gpu / 8 * 1e9)


def test_rotations_by_matrices_need_more_memory() -> None:
    plain, matrices = (
        _traced({**ROW, "source": source, "vocab": "64", "ac": "none"})
        for source in ("own runs", "fms-fsdp README")
    )
    heads = 2 * 256 * 64  # batch, length, width
    assert max(plain.sizes) < 8 * heads == max(matrices.sizes)


def test_tensor_parallel_float8_gathers_bytes() -> None:
    def gathered(notes: str) -> set[int]:
        ops = _traced({**ROW, "tp": "2", "notes": notes}).events
        return {op.writes[0][1] for op in ops if getattr(op, "name", "") == "published.gather"}

    assert 2 * 256 * 64 in gathered("float8 tensorwise")
    assert 2 * 256 * 64 not in gathered("float8 rowwise")


def test_a_pipeline_waits_and_keeps_the_activations_of_its_microbatches() -> None:
    whole = published_runs.predict(published_runs.read_row(ROW))
    row = {**ROW, "pp": "2", "gpus": "16", "local_batch": "4"}
    run = published_runs.read_row(row)
    piped = published_runs.predict(run)
    assert (run.form.layers, run.shards, run.batch, run.tokens) == (3, 8, 2, 4 * 256 / 2)
    # Each rank runs half of the layers for two microbatches, and waits for a third.
    assert 1.2 < piped["arithmetic_seconds"] / whole["arithmetic_seconds"] < 1.9
    twice = published_runs.predict(replace(run, microbatches=3))
    assert twice["active_gib"] > piped["active_gib"]


@pytest.mark.parametrize(("gpu", "expands"), [("MI300X", False), ("H100", True)])
def test_expandable_segments_need_a_torch_that_has_them(gpu: str, expands: bool) -> None:
    row = {**ROW, "gpu_type": gpu, "source": "torchtitan PR 2025-08"}
    assert published_runs.read_row(row).expandable_segments is expands


def test_a_published_command_without_the_script_has_no_expandable_segments() -> None:
    row = {**ROW, "gpu_type": "H200", "source": "torchtitan H200 Trainy 2025-06"}
    assert not published_runs.read_row(row).expandable_segments


@pytest.mark.parametrize(
    ("gpu", "date", "is_cudnn", "kept"),
    [
        ("H100", "2024-08", True, False),
        ("H100", "2025-06", False, True),
        ("H100", "2025-10-15", True, False),
        ("H100", "2026-01", True, True),
        ("B200", "2025-06", True, False),
        ("A100-80GB", "2024-08", False, True),
    ],
)
def test_attention_is_the_kernel_of_the_date(
    gpu: str, date: str, is_cudnn: bool, kept: bool
) -> None:
    row = {**ROW, "source": f"torchtitan {date}", "gpu_type": gpu, "ac": "selective op"}
    run = published_runs.read_row({**row, "heads": "1", "kv_heads": "1", "hidden": "128"})
    assert run.attention_speeds == (CUDNN if is_cudnn else (1.0, 1.0))
    assert run.form.checkpoint == ("op" if kept else "op without attention")


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "speeds"),
    [
        ("MPT-7b", "H100-80GB", "64", TRITON),
        ("MPT-7b", "H100-80GB", "128", (1.0, 1.0)),
        ("MPT-13b", "H100-80GB", "128", TRITON),
        ("MPT-7b", "A100-80GB", "128", TRITON),
    ],
)
def test_some_large_runs_of_llm_foundry_used_flash_attention_2(
    model: str, gpu: str, gpus: str, speeds: tuple[float, float]
) -> None:
    row = {**ROW, "model": model, "gpu_type": gpu, "gpus": gpus}
    assert published_runs.read_row(row).attention_speeds == speeds


def test_a_card_with_a_stated_limit_on_power_is_a_kind_of_its_own() -> None:
    kinds = [
        published_runs.read_row({**ROW, "gpu_type": name}).kind
        for name in ("B200 (power limited)", "B200-180GB", "H100-96GB-HBM2e 500W", "H100-96GB")
    ]
    assert kinds == ["b200 with limited power", "b200", "h100-96gb with limited power", "h100-96gb"]


def _predicted(**change: str) -> dict[str, Any]:
    return published_runs.predict(published_runs.read_row({**ROW, **change}))


def test_a_graph_overlaps_all_gathers_since_its_bucketing_pass() -> None:
    row = {"strategy": "graph trainer", "compile": "True", "gpus": "64"}
    before, after = (
        _predicted(**row, source=f"torchtitan {date}") for date in ("2026-04-19", "2026-04-21")
    )
    assert before["exposed"] > 1.5 * after["exposed"]


def test_only_full_inductor_fuses_the_operators_of_a_graph() -> None:
    row = {**ROW, "source": "torchtitan 2026-06", "strategy": "graph trainer", "compile": "True"}
    assert published_runs.read_row({**row, "notes": "full inductor"}).is_compiled
    assert not published_runs.read_row({**row, "notes": "regional inductor"}).is_compiled


def test_checkpoints_of_torchtitan_recompute_the_whole_block_since_2025_08() -> None:
    before, after = (_predicted(source=f"torchtitan {date}") for date in ("2025-08-20", "2025-09"))
    assert after["arithmetic_seconds"] > 1.03 * before["arithmetic_seconds"]


def test_a_collective_slows_the_matrix_products_that_run_at_the_same_time() -> None:
    run = published_runs.read_row({**ROW, "hidden": "2048", "layers": "4"})
    trace = published_runs.traced(run.form, run.batch, False, run.stored, run.reduce_dtype)
    replay = Fsdp2Replay(run, trace.trace, trace.flats(8), run.machine)
    replay.play()
    op = Op("aten.mm", 10**12, ((-1, 8), (-1, 8)), ((0, 8),), "matmul")
    alone = replay.op_seconds(op)
    replay.clock, replay._link_free = 0.0, alone / 2
    assert replay.op_seconds(op) == pytest.approx(alone * (1 + COLLECTIVE_SHARE / 2))
    replay._link_free = 9 * alone
    assert replay.op_seconds(op) == pytest.approx(alone / (1 - COLLECTIVE_SHARE))


def test_a_strategy_that_shards_only_gradients_keeps_its_parameters() -> None:
    kept, freed = (_predicted(strategy=f"FSDP1 ({one})") for one in ("SHARD_GRAD_OP", "FULL_SHARD"))
    assert kept["peak"]["unsharded"] > freed["peak"]["unsharded"]


def _frees(events: list[Event]) -> list[tuple[int, int]]:
    """Return pairs of a freed block and the number of operators before the free."""
    return [
        (event.block, sum(isinstance(one, Op) for one in events[:place]))
        for place, event in enumerate(events)
        if isinstance(event, Free)
    ]


def _op(name: str, read: int, written: int) -> Op:
    return Op(name, 0, ((read, 8),), ((written, 8),), "other")


def test_collectives_hold_their_memory_until_the_gpu_has_run_them() -> None:
    events = [_op("published.gather", 0, 1), Free(0), *[_op("aten.mul", 2, 3)] * 3, Free(2)]
    assert _frees(events) == [(0, 1), (2, 4)]
    assert _frees(held_by_collectives(StepTrace(events), 2).events) == [(0, 3), (2, 4)]
    assert _frees(held_by_collectives(StepTrace(events), 99).events) == [(2, 4), (0, 4)]


def test_a_graph_frees_each_block_after_its_last_use() -> None:
    events = [_op("aten.mul", -1, 0), _op("aten.mul", 0, 1), _op("aten.mul", 1, 2), Free(0)]
    events += [Free(1), Mark("gradient", 0, 2)]
    assert _frees(events) == [(0, 3), (1, 3)]
    assert _frees(freed_at_last_use(StepTrace(events)).events) == [(0, 2), (1, 3)]


def test_rows_hold_collectives_and_free_early_as_their_strategies_do() -> None:
    def active(**change: str) -> float:
        run = published_runs.read_row({**ROW, "ac": "selective op", **change})
        return float(published_runs.predict(run)["active_gib"])

    before, after = (active(tp="2", source=f"torchtitan {date}") for date in ("2024-03", "2024-05"))
    assert before > 1.1 * after
    eager, graph = (
        active(source="torchtitan 2026-06", strategy=one, compile="True" if "graph" in one else "")
        for one in ("FSDP2", "graph trainer")
    )
    # The graph saves all matrix products instead of every second one.
    assert graph > eager
    kinds = [
        published_runs.read_row({**ROW, "source": f"torchtitan {date}", "strategy": "graph"})
        for date in ("2026-03", "2026-04-25", "2026-06")
    ]
    assert [one.keeps_all for one in kinds] == [False, True, False]


def test_fsdp1_frees_a_unit_two_all_gathers_later() -> None:
    run = published_runs.read_row({**ROW, "strategy": "FSDP1", "layers": "4"})
    unit = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)  # bytes of a block in bfloat16
    root = 2 * (2 * 256 * 64 + 64)
    found = published_runs.predict(run)["peak"]["unsharded"] * published_runs.GIB
    # The current unit, the prefetched unit, and two resharded units with memory not freed yet.
    assert found == pytest.approx(root + 4 * unit, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [{"model": "gpt2"}, {"model": "MPT-7b", "tp": "2"}, {"tp": "4"}, {"strategy": "DDP"}],
    ids=["grouped queries", "positions", "more ranks than heads", "no shards"],
)
def test_rows_of_all_forms_have_a_prediction(change: dict[str, str]) -> None:
    found = published_runs.predict(published_runs.read_row({**ROW, "layers": "4", **change}))
    assert found["reserved_gib"] >= found["active_gib"] > 0


@pytest.mark.parametrize(
    ("gpu", "device"), [("A100-80GB, 400Gbps", "a100"), ("A100 40GB", "a100-40gb")]
)
def test_a_link_is_no_amount_of_memory(gpu: str, device: str) -> None:
    assert published_runs.read_row({**ROW, "gpu_type": gpu}).device == device


def test_a_trace_of_four_layers_stands_for_all() -> None:
    form = replace(published_runs.read_row(ROW).form, layers=7, checkpoint="op")
    arguments = (form, 2, False, torch.float32, torch.float32)
    short = published_runs.traced(*arguments).trace
    whole = published_runs.traced(*arguments, shallow_layers=7).trace
    assert Counter(short.sizes) == Counter(whole.sizes)
    assert [type(one) for one in short.events] == [type(one) for one in whole.events]
    assert [getattr(one, "name", one[1]) for one in short.events if not hasattr(one, "block")] == [
        getattr(one, "name", one[1]) for one in whole.events if not hasattr(one, "block")
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, "none.csv: cannot be read"),
        ({"source": "x"}, "lacks the columns url, model"),
        ({**ROW, "layers": "many"}, "line 2: invalid literal"),
    ],
)
def test_a_bad_file_is_one_line(
    row: dict[str, str] | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "none.csv") if row is None else _file(tmp_path / "b.csv", row)
    with pytest.raises(SystemExit) as ended:
        _main(monkeypatch, path)
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in message
    assert message.count("\n") == 1
