"""The rates of one thread of this machine, measured in a second or two, in CPU time: so they hold while others
use the machine as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.planner.device_specs import Device

TRIALS = 5
BLOCKS = 4  # of the model whose blocks are too small to compute anything


def calibrated(device: Device, *, hidden: int = 256) -> Device:
    """The CPU with the rates that one thread reaches.

    Args:
        device: rolemesh.planner.device_specs.cpu(...).
        hidden: width of the matrices; of the order of the model's, since small ones reach less.
    """
    tokens = torch.randn(1024, hidden)
    weight = torch.randn(4 * hidden, hidden)
    product = _seconds(lambda: tokens @ weight.T)
    flops = 2 * len(tokens) * weight.numel() / product
    large = torch.randn(2**20)  # 4 MiB, as the activations of a micro-batch
    bandwidth = 2 * large.nbytes / _seconds(lambda: large * 2)
    block_s = _seconds(_forward_of_nothing()) / BLOCKS
    return replace(
        device,
        flops=dict.fromkeys(device.flops, flops),
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth,
        block_s=block_s,
        trained_block_s=3 * block_s,
    )


def _forward_of_nothing() -> Callable[[], Tensor]:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=BLOCKS,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    ids = torch.zeros(1, 4, dtype=torch.int64)

    @torch.no_grad()
    def forward() -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits

    return forward


def _seconds(work: Callable[[], Tensor]) -> float:
    """CPU seconds: the least of several trials, each of at least a fiftieth of a second."""
    work()
    began = time.process_time()
    work()
    repeats = max(1, int(0.02 / max(1e-6, time.process_time() - began)))
    trials = []
    for _ in range(TRIALS):
        began = time.process_time()
        for _ in range(repeats):
            work()
        trials.append((time.process_time() - began) / repeats)
    return min(trials)
