"""Rows end to end: the same numbers and gradients as with padding, the same bits whatever lies beside a row."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from float64 import in_float64
from torch.nn.attention.varlen import varlen_attn
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from transformers import modeling_utils

from rolemesh.config.model import TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.models import chunks, distribution
from rolemesh.models.distribution import head
from rolemesh.models.heads import ScoreModel
from rolemesh.models.packed import attention
from rolemesh.models.packed.layout import pack, padded_width
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import token_stats, token_values
from rolemesh.training.update_loop import checkpoint_activations

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Llama": {"num_key_value_heads": 4},
    "Mistral": {"sliding_window": 5},
}


def causal_lm(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS.get(kind, {}) | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    return in_float64(model) if dtype is torch.float64 and kind in KINDS else model


def uneven(num_rows: int, *, prompt: int = 30, response: int = 40, seed: int = 0) -> DataProto:
    """Rows of 2 to 70 tokens, three to a prompt; one of the three has a token in its middle that the policy did
    not sample, and one begins to answer as that one does."""
    generator = torch.Generator().manual_seed(seed)
    before, after = (
        torch.randint(1, top + 1, (num_rows, 1), generator=generator) for top in (prompt, response)
    )
    before = before[torch.arange(num_rows) // 3 * 3]
    column = torch.arange(prompt + response)
    mask = (column >= prompt - before) & (column < prompt + after)
    sampled = mask[:, prompt:].clone()
    sampled[::3, 1:2] = False
    ids = torch.randint(3, 256, mask.shape, generator=generator)
    for row in range(num_rows):
        alike = prompt + (5 if row % 3 == 1 else 0)
        ids[row, :alike] = ids[row // 3 * 3, :alike]
    ids *= mask
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return DataProto(
        {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions, "response_mask": sampled}
    )


def stats_and_gradients(model: Any, rows: DataProto, device: torch.device = CPU) -> list[torch.Tensor]:
    model.zero_grad()
    how = {"temperature": 0.7, "entropy_gradient": True, "sum_pi_squared": True}
    stats = token_stats(model, rows, device=device, **how)
    assert stats.entropys is not None and stats.sum_pi_squared is not None  # noqa: PT018
    weights = (
        torch.linspace(-1, 1, stats.log_probs.numel()).view(stats.log_probs.shape).to(stats.log_probs.device)
    )
    torch.autograd.backward((weights * stats.log_probs + weights.flip(0) * stats.entropys).sum())
    mask = rows["response_mask"]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(column.detach()[mask] for column in stats if column is not None), *gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_match_padded_numbers_and_gradients(kind: str) -> None:
    rows = uneven(9)
    for dtype, error in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = causal_lm(kind, dtype)
        padded = stats_and_gradients(model, rows)
        remove_padding(model.get_decoder(), "actor")
        packed = stats_and_gradients(model, rows)
        for mine, theirs in zip(packed, padded, strict=True):
            assert_close(mine, theirs, rtol=error, atol=error * max(1.0, float(theirs.abs().max())))


def test_packed_values_are_padded_ones() -> None:
    rows, found = uneven(9), []
    model = in_float64(ScoreModel(causal_lm("Qwen2").model, seed=0))
    for packed in (False, True):
        if packed:
            remove_padding(model.body, "critic")
        values = token_values(model, rows)
        values[rows["response_mask"]].square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([values.detach()[rows["response_mask"]], *gradients])
        model.zero_grad()
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_equal_beginnings_are_there_once() -> None:
    """By hand: (1 2 3 4), (1 2 5), (6 2) and (1 2 3 4) again have 7 tokens that differ in themselves or in what
    lies before them. Another position makes another token."""
    ids = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 5], [6, 2, 0, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    _, places = pack(ids, mask, positions)
    assert len(places[mask.bool()].unique()) == 7
    assert places[0].tolist() == places[3].tolist()
    assert places[0, :2].tolist() == places[1, 1:3].tolist()
    assert places[2, 0] != places[0, 0]
    positions[3, 2:] += 1
    _, places = pack(ids, mask, positions)
    assert len(places[mask.bool()].unique()) == 9


def test_the_tokens_of_a_pass_are_those_of_its_rows() -> None:
    rows = uneven(24)
    ids, mask, positions = (rows[name] for name in ("input_ids", "attention_mask", "position_ids"))
    inputs, places = pack(ids, mask, positions)
    attended = mask.bool()
    assert torch.equal(inputs["input_ids"][0, places[attended]], ids[attended])
    assert torch.equal(inputs["position_ids"][0, places[attended]], positions[attended])
    beginnings = {
        tuple(row[known][: count + 1].tolist())
        for row, known in zip(ids, attended, strict=True)
        for count in range(int(known.sum()))
    }
    assert len(places[attended].unique()) == len(beginnings) < 0.8 * int(mask.sum())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "response"), [("Qwen2", 40), ("Mistral", 40), ("Qwen2", 600)])
def test_a_rows_bits_are_its_own(kind: str, response: int, threads: int) -> None:
    """Alone, beside others of any length, those with the same beginning too, and in another order. A few rows,
    and enough for several blocks."""
    settings = {"hidden_size": 64, "vocab_size": 5000, "max_position_embeddings": 1024}
    model, rows = causal_lm(kind, torch.float32, **settings), uneven(24, response=response)
    remove_padding(model.get_decoder(), "actor")

    @torch.no_grad()
    def of(chosen: list[int]) -> torch.Tensor:
        part = rows.select_idxs(chosen)
        stats = token_stats(model, part, temperature=0.7, sum_pi_squared=True)
        return torch.stack([torch.where(part["response_mask"], t, 0) for t in stats if t is not None], -1)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = of(list(range(24)))
        for chosen in ([3], [0, 3], list(range(23, -1, -1)), list(range(0, 24, 2)), [5, 5, 5], list(range(9))):
            assert torch.equal(of(chosen), whole[chosen])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings", [{}, {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1}]
)
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_a_long_beginning_has_the_bits_of_its_own_row(kind: str, settings: dict[str, Any]) -> None:
    """Rows that have 850, or 300, tokens in common and padded widths on both sides of each bound."""
    window = {"sliding_window": 600} if kind == "Mistral" else {}
    model = causal_lm(kind, torch.float32, max_position_embeddings=4096, **settings, **window)
    remove_padding(model.get_decoder(), "actor")
    lengths = torch.tensor([870, 890, 1000, 1024, 1100, 1400, 1700, 2100, 310, 400, 440, 500, 600])
    mask = torch.arange(2100) < lengths[:, None]
    ids = torch.randint(3, 256, mask.shape, generator=torch.Generator().manual_seed(0))
    ids[:8, :850], ids[8:, :300] = ids[0, :850], ids[0, :300]
    rows = DataProto(
        {"input_ids": ids * mask, "attention_mask": mask.long(), "position_ids": mask.long().cumsum(1) - 1,
         "response_mask": mask[:, 10:]}
    )  # fmt: skip
    with torch.no_grad():
        together = token_stats(model, rows, temperature=1.0).log_probs
        for row in range(len(lengths)):
            alone = token_stats(model, rows.select_idxs([row]), temperature=1.0).log_probs[0]
            assert torch.equal(
                torch.where(mask[row, 10:], alone, 0), torch.where(mask[row, 10:], together[row], 0)
            )


def test_attention_pads_a_row_by_a_quarter_at_most() -> None:
    widths = [padded_width(length) for length in range(1, 5000)]
    assert [padded_width(length) for length in (1, 16, 17, 64, 65, 128, 129, 257, 1025)] == [
        16, 16, 32, 64, 80, 128, 160, 320, 1280
    ]  # fmt: skip
    assert all(length <= width for length, width in enumerate(widths, 1))
    assert all(width <= 1.25 * length for length, width in enumerate(widths, 1) if length > 64)
    assert len(set(widths)) < 40


# ---------------------------------------------------------------------------- logits in chunks


@pytest.mark.parametrize("gradient", [False, True])
def test_chunks_and_blocks_give_what_the_whole_gives(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = causal_lm("Qwen2"), uneven(40)
    remove_padding(model.get_decoder(), "actor")

    def found() -> list[torch.Tensor]:
        if gradient:
            return stats_and_gradients(model, rows)
        with torch.no_grad():
            stats = token_stats(model, rows, temperature=0.7, sum_pi_squared=True)
        return [column for column in stats if column is not None]

    assert rows["response_mask"].sum() > 2 * chunks.MIN_MATRIX_ROWS
    whole = found()
    monkeypatch.setattr(chunks, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(distribution, "BLOCK_LOGITS", 5 * SMALL["vocab_size"])
    for mine, theirs in zip(found(), whole, strict=True):
        assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None}),
        ("Granite", {"logits_scaling": 3.0}),
    ],
)
def test_a_models_own_change_of_its_logits_is_applied(kind: str, settings: dict[str, Any]) -> None:
    model, ids = causal_lm(kind, **settings), torch.arange(3, 12)[None]
    output = model.get_decoder()(input_ids=ids, use_cache=False)
    expected = model(input_ids=ids).logits[0]
    assert_close(head(model, output, output.last_hidden_state[0]), expected)
    assert not torch.allclose(output.last_hidden_state[0] @ model.lm_head.weight.T, expected)


def test_the_sum_of_squared_probabilities_of_two_tokens() -> None:
    """Softmax of (0, ln 3) is (1/4, 3/4), and 1/16 + 9/16 = 10/16."""
    wanted = distribution.WantedStatistics(1.0, True, False, True)
    logits = torch.tensor([[1.0, 3.0]]).log()
    stats = wanted.of(logits, torch.tensor([1]), None)
    assert stats.sum_pi_squared is not None
    assert_close(stats.sum_pi_squared, torch.tensor([0.625]))
    assert_close(stats.log_probs, torch.tensor([0.75]).log())


def test_large_vocabulary_log_probs_need_one_chunk_of_logits() -> None:
    """Of 512 response tokens 256 at a time: 156 MB of logits, where the batch's are 311 MB."""
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = causal_lm("Qwen2", torch.float32, vocab_size=152_000, **tiny)
    remove_padding(model.get_decoder(), "actor")
    mask = torch.ones(8, 68, dtype=torch.int64)
    rows = DataProto(
        {"input_ids": torch.arange(8 * 68).view(8, 68), "attention_mask": mask,
         "position_ids": mask.cumsum(-1) - 1, "response_mask": mask[:, 4:].bool()}
    )  # fmt: skip
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        token_stats(model, rows, temperature=0.7, sum_pi_squared=True)
    assert profiled.profiler is not None
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    chunk = 256 * 152_000 * 4
    assert chunk <= peak < 1.3 * chunk


@pytest.mark.gpu
def test_packed_bfloat16_rows_match_padded_ones_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There attention is the kernel for uneven lengths, and keeps its window."""
    windows: list[tuple[int, int]] = []

    def counted(*inputs: Any, window_size: tuple[int, int], **options: Any) -> Any:
        windows.append(window_size)
        return varlen_attn(*inputs, window_size=window_size, **options)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    for kind, window in (("Qwen2", (-1, 0)), ("Mistral", (4, 0))):
        model, rows = causal_lm(kind, torch.float32).cuda(), uneven(9)
        stats = partial(token_stats, model, rows, temperature=0.7, device=CUDA, dtype="bfloat16")
        with torch.no_grad():
            padded = stats()
            remove_padding(model.get_decoder(), "actor", "bfloat16")
            windows.clear()
            packed = stats()
        assert_close(packed.log_probs, padded.log_probs, rtol=0.05, atol=0.1)
        assert windows == [window] * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("device", "weights", "offload"),
    [("meta", "meta", True), ("meta", "cpu", True), ("meta", "meta", False), ("cpu", "cpu", True)],
)
def test_activations_are_offloaded_only_if_set_and_on_a_device(
    device: str, weights: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a device, also with weights on the host between passes (param_offload). What moves
    activations wants pinned memory, and is only noted."""
    asked: list[dict[str, Any]] = []

    def noted(**how: Any) -> AbstractContextManager[None]:
        asked.append(how)
        return nullcontext()

    monkeypatch.setattr(modeling_utils, "save_on_cpu", noted)
    model = causal_lm("Qwen2", torch.float32).to(weights).train()
    config = TrainedModelConfig(path="", enable_activation_offload=offload)
    checkpoint_activations(model, config, torch.device(device))
    model.to(device)
    hidden, angles = torch.zeros(1, 5, 32, device=device), torch.zeros(1, 5, 8, device=device)
    for layer in model.get_decoder().layers:
        layer(hidden, position_embeddings=(angles, angles))
    assert len(asked) == (model.config.num_hidden_layers if offload and device == "meta" else 0)


@pytest.mark.gpu
def test_offloaded_activations_keep_gradients_and_free_the_gpu() -> None:
    """Without the inputs of the layers the peak is lower by most of their size."""
    rows, layers, width = uneven(64), 16, 256
    peaks, gradients = [], []
    for offload in (False, True):
        model = causal_lm("Qwen2", torch.float32, num_hidden_layers=layers, hidden_size=width).cuda().train()
        config = TrainedModelConfig(path="", enable_activation_offload=offload)
        checkpoint_activations(model, config, torch.device("cuda"))
        remove_padding(model.get_decoder(), "actor")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients.append([gradient.cpu() for gradient in stats_and_gradients(model, rows, CUDA)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    num_tokens = pack(rows["input_ids"], rows["attention_mask"], rows["position_ids"])[0]["input_ids"].numel()
    assert peaks[0] - peaks[1] > 0.5 * layers * num_tokens * width * 4
    for mine, theirs in zip(*gradients, strict=True):  # kernels of a GPU add in any order
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm()
