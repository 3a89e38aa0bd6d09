"""Batch invariance: the number of rows from which on a matrix product gives each row the same bits."""

from __future__ import annotations

import torch
from torch import nn

from rolemesh.models.heads import VocabularyHead

MIN_ROWS = 16


@torch.inference_mode()
def batch_invariant_rows(model: nn.Module, most: int) -> int:
    """Find the batch size from which a row's bits do not depend on the number of rows.

    Libraries use other kernels for matrices of few rows, and may split the sum between several threads. MKL
    does so up to 2, 5, 10 or 15 rows (64, 128, 256, 512 and more inputs) on one thread, and up to 129 rows (896
    inputs) on two. The kernel depends only on the shapes, so it is enough to pass random numbers through one
    linear layer of each shape.

    Args:
        model: its linear layers are tried.
        most: the reference size; returned if no smaller size agrees with it.

    Returns:
        `most`, halved as long as the outputs of all layers stay equal, at least MIN_ROWS.
    """
    linears = {
        (type(module), module.weight.shape): module
        for module in model.modules()
        if isinstance(module, (nn.Linear, VocabularyHead))
    }
    generator = torch.Generator().manual_seed(0)
    tried = []
    for linear in linears.values():
        inputs = torch.randn(most, linear.weight.shape[1], generator=generator).to(linear.weight)
        tried.append((linear, inputs, linear(inputs)))
    rows = most
    while rows > MIN_ROWS:
        fewer = max(MIN_ROWS, rows // 2)
        if not all(torch.equal(linear(inputs[-fewer:]), outputs[-fewer:]) for linear, inputs, outputs in tried):
            break
        rows = fewer
    return rows
