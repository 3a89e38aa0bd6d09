"""The benchmark of ranks: how it divides an update, and that verl's scheme is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from many_ranks import on_ranks
from transformers import AutoModelForCausalLM

from benchmarks.ranks.contestants import parts_of, uneven_rows
from benchmarks.ranks.verl import PaddedMeans
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.ranks import Ranks


def test_update_seconds_are_split_by_the_slowest_ranks_work() -> None:
    """Rank 1 computes 6 s and waits 1 s in collectives; rank 0 computes 4 s and waits for rank 1 as well."""
    figures = [{"learn": 7.0, "collectives": 3.0, "cpu": 4.0}, {"learn": 7.0, "collectives": 1.0, "cpu": 6.0}]
    parts = parts_of(figures, 0.5, 0.75)
    assert parts == {"commands": 0.5, "rows": 0.25, "collectives": 1.0, "imbalance": 1.0, "computing": 5.0}
    assert parts["computing"] + parts["imbalance"] + parts["collectives"] == 7.0


def means(ranks: Ranks, directory: Path, model: Path) -> None:
    """Every rank gets all rows. Then the mean over ranks is that of a rank, which one process computes."""
    assert ranks.mesh is not None
    rows = uneven_rows(4, (6, 10))
    norm = PaddedMeans(model, ranks.mesh, 2, 1e-4).update(rows)
    (directory / f"norm-{ranks.rank}").write_text(str(norm))


def test_verls_scheme_takes_the_mean_of_means(tmp_path: Path) -> None:
    """Its gradient is not that of the mini-batch's mean, but of the mean over micro-batches of their means."""
    model = make_tiny_model(tmp_path / "model", hidden_size=32)
    on_ranks(2, means, tmp_path, model)
    norms = [float((tmp_path / f"norm-{rank}").read_text()) for rank in range(2)]
    assert norms[0] == norms[1]
    rows = uneven_rows(4, (6, 10))
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = alone(**inputs, use_cache=False).logits[:, 5:-1]
    log_probs = logits.log_softmax(-1).gather(-1, rows["input_ids"][:, 6:, None])[..., 0]
    ratio, advantages, mask = (
        (log_probs - rows["old_log_probs"]).exp(),
        rows["advantages"],
        rows["response_mask"],
    )
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages) * mask
    of_micro_batches = [losses[at].sum() / mask[at].sum() for at in (slice(0, 2), slice(2, 4))]
    torch.autograd.backward(torch.stack(of_micro_batches).mean())
    norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    assert norms[0] == pytest.approx(float(norm), rel=1e-5)
