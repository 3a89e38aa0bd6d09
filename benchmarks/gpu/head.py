"""The head of a policy with a large vocabulary: kernels and seconds of log-probs, and errors in bfloat16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from benchmarks.gpu.workload import Missed, check, synchronized
from rolemesh.models import chunks, distribution
from rolemesh.models.chunks import BLOCK_BYTES, BLOCK_SHARE, tokens_in_block
from rolemesh.models.distribution import TokenStats, WantedStatistics, distribution_stats
from rolemesh.models.heads import VocabularyHead

LOG_PROBS = WantedStatistics(0.7, entropy=True, entropy_gradient=False, sum_pi_squared=False)
ROUNDS = 4
MOST_KERNELS = 12  # of a block
OF_LOGITS = 5  # of these, which go over float32 logits: cast, temperature, exp, product, sum
HEADS = ("autocast", "model", "float32")  # without a head of ours, and by actor.head_dtype


@dataclass(frozen=True)
class Sizes:
    """Sizes of the part.

    Args:
        hidden, vocabulary: of the head.
        tokens: of the log-probabilities that are timed.
        few: tokens whose kernels are counted too, and which are compared with float64.
        num_chunks: into which the gradient of these is cut.
    """

    hidden: int
    vocabulary: int
    tokens: int
    few: int
    num_chunks: int


SIZES = {"cuda": Sizes(1536, 151_936, 16 * 1024, 512, 64), "cpu": Sizes(32, 4096, 1200, 600, 30)}


class Problem:
    """A head whose logits have a standard deviation of 3, hidden states [n, H], and sampled tokens [n]."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.model = LlamaForCausalLM(config).eval()
            nn.init.normal_(self.model.lm_head.weight, std=3 / sizes.hidden**0.5)
            self.hidden = torch.randn(sizes.tokens, sizes.hidden)
            self.drawn = torch.randint(sizes.vocabulary, (sizes.tokens,))

    def stats(self, num_tokens: int, head: str = "model") -> TokenStats:
        """Statistics of the first tokens, in bfloat16, or in float64 if the model is."""
        hidden = self.hidden[:num_tokens].to(self.model.dtype)
        drawn = self.drawn[:num_tokens]
        own = None if head == "autocast" else VocabularyHead.of(self.model, torch.bfloat16, head, "actor")
        output = BaseModelOutputWithPast(last_hidden_state=hidden)
        narrow = self.model.dtype is torch.float32
        with torch.autocast(self.device, torch.bfloat16, enabled=narrow):
            return distribution_stats(
                self.model, output, hidden, drawn, None, LOG_PROBS, own if narrow else None
            )

    @torch.no_grad()
    def log_probs(self, num_tokens: int, head: str = "model") -> Tensor:
        return self.stats(num_tokens, head).log_probs

    def gradient(self, num_tokens: int, head: str) -> Tensor:
        """The gradient of the head's weight, of a weighted sum of log-probabilities."""
        self.model.zero_grad()
        log_probs = self.stats(num_tokens, head).log_probs
        weights = torch.linspace(0.5, 1.5, num_tokens, device=self.device)
        torch.autograd.backward((log_probs * weights).sum())
        gradient = self.model.lm_head.weight.grad
        assert isinstance(gradient, Tensor)
        return gradient


def head(device: str, directory: Path) -> dict[str, Any]:
    """Log-probabilities by a CPU's blocks (old) and by the GPU's (new), and the errors of each kind of head.

    Contestants are interleaved, and the first round warms up.
    """
    sizes = SIZES[device]
    problem = Problem(sizes, device)
    most = memory_bytes(device)
    blocks = {
        name: patch.object(distribution, "device_memory", lambda _, memory=memory: memory)
        for name, memory in (("old", None), ("new", most))
    }
    launched = {}
    seconds = defaultdict[str, list[float]](list)
    found: dict[str, Tensor] = {}
    for name, within in blocks.items():
        with within:
            found[name] = problem.log_probs(sizes.tokens)
            for tokens in (sizes.few, sizes.tokens):
                names = kernels(partial(problem.log_probs, tokens), device)
                launched[f"{name}, {tokens} tokens"] = len(names)
                if (name, tokens) == ("new", sizes.few):
                    of_a_block = names
    for _ in range(ROUNDS + 1):
        for name, within in blocks.items():
            with within:
                seconds[f"log-probs, {name}"].append(timed(partial(problem.log_probs, sizes.tokens), device))
        for kind in HEADS:
            seconds[f"gradient, {kind}"].append(timed(partial(problem.gradient, sizes.tokens, kind), device))
    block = tokens_in_block(sizes.vocabulary, most)
    blocks_of = [min(block, sizes.tokens - at) for at in range(0, sizes.tokens, block)]
    num_blocks = len(blocks_of)
    bound = 2 + sum(most_kernels(n, sizes.vocabulary) for n in blocks_of)  # two columns are joined
    far = float((found["old"] - found["new"]).abs().max())
    check(far < 0.1, f"log-probabilities by blocks of another size differ by up to {far}")
    figures: dict[str, Any] = {
        "blocks": num_blocks,
        "kernels": launched,
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "old_over_new": min(seconds["log-probs, old"][1:]) / min(seconds["log-probs, new"][1:]),
        "largest_difference": far,
        "kernels of a block": of_a_block,
    }
    if device == "cuda":
        figures["block_bytes_per_logit"] = peak_of_a_logit(problem, sizes)
        check(figures["block_bytes_per_logit"] <= 1.1 * BLOCK_BYTES, f"more than planned: {figures}")
    figures["errors"] = errors(problem, sizes)
    if device == "cuda" and launched[f"new, {sizes.tokens} tokens"] > bound:
        raise Missed(f"{launched} kernels; wanted {bound} for {num_blocks} blocks", figures)
    return figures


def most_kernels(tokens: int, vocabulary: int) -> int:
    """How many kernels a block may take.

    A kernel of torch's TensorIterator counts bytes in 32 bits. It halves the rows of an operand until each part
    is below 2 GiB, and is launched for each part.
    """
    return MOST_KERNELS + OF_LOGITS * (num_parts(tokens, vocabulary) - 1)


def num_parts(tokens: int, vocabulary: int) -> int:
    if 4 * tokens * vocabulary < 2**31:
        return 1
    return num_parts(tokens // 2, vocabulary) + num_parts(tokens - tokens // 2, vocabulary)


def memory_bytes(device: str) -> int:
    """The memory of the GPU; on a CPU so much that there are two blocks, to try the code."""
    if device == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return SIZES[device].tokens * SIZES[device].vocabulary * BLOCK_BYTES * BLOCK_SHARE


def kernels(call: Callable[[], Tensor], device: str) -> list[str]:
    """The kernels that a call launches on the GPU, without copies and fills; on a CPU, its operations."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    call()
    with profile(activities=[activity]) as profiled:
        call()
        synchronized(device)
    names = [event.name for event in profiled.events() or () if event.device_type.name == activity.name]
    return [name[:80] for name in names if not name.startswith(("Memcpy", "Memset"))]


def timed(call: Callable[[], Tensor], device: str) -> float:
    began = synchronized(device)
    call()
    return synchronized(device) - began


def peak_of_a_logit(problem: Problem, sizes: Sizes) -> float:
    """The peak bytes of a full block beside the cast weight, by the logit."""
    tokens = min(sizes.tokens, tokens_in_block(sizes.vocabulary, memory_bytes("cuda")))
    problem.model.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() + 2 * problem.model.lm_head.weight.numel()
    problem.log_probs(tokens)
    return float(torch.cuda.max_memory_allocated() - before) / (tokens * sizes.vocabulary)


def errors(problem: Problem, sizes: Sizes) -> dict[str, Any]:
    """How far log-probabilities and the gradient of the weight are from float64, for each kind of head.

    The gradient is once computed of all tokens at once, and once in many chunks.
    """
    found: dict[str, Any] = {kind: {"log_probs": problem.log_probs(sizes.few, kind)} for kind in HEADS}
    for num_chunks in (1, sizes.num_chunks):
        tokens = -(-sizes.few // num_chunks)
        with patch.object(chunks, "CHUNK_LOGITS", 1), patch.object(chunks, "MIN_MATRIX_ROWS", tokens):
            for kind in HEADS:
                found[kind][num_chunks] = problem.gradient(sizes.few, kind).clone()
    model = problem.model.double()
    exact = {"log_probs": problem.log_probs(sizes.few), "gradient": problem.gradient(sizes.few, "autocast")}
    figures: dict[str, Any] = {}
    for kind in HEADS:
        off = (found[kind]["log_probs"] - exact["log_probs"]).abs()
        norm = exact["gradient"].norm()
        relative = {
            f"gradient, {n} chunks": float((found[kind][n] - exact["gradient"]).norm() / norm)
            for n in (1, sizes.num_chunks)
        }
        figures[kind] = {"log_probs mean": float(off.mean()), "log_probs max": float(off.max()), **relative}
        if kind != "autocast":
            one, many = relative.values()
            check(many <= 1.2 * one, f"the gradient of many chunks is worse than of one: {figures}")
    model.float()
    own = figures["float32"]["log_probs mean"]
    rounded = figures["model"]["log_probs mean"]
    check(own < 0.8 * rounded, f"float32 logits are hardly better than rounded ones: {figures}")
    return figures
