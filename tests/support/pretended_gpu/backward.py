"""The backward pass in Python. Torch's own engine would ask the driver for the streams of a device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pretended_gpu.record import Backward
from pretended_gpu.tensors import GpuTensor

_tasks = itertools.count(1)


def run_backward(plain: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Run torch.autograd.backward of one scalar on the GPU; of anything else by `plain`.

    As in torch's engine a gradient is summed and cast to what a node expects, and leaves get theirs added up.
    """
    if not isinstance(tensors, GpuTensor):
        plain(tensors, *args, **kwargs)
        return
    assert tensors.dim() == 0, "only of a scalar"
    assert not args, "without gradients of its own"
    task, own_id = next(_tasks), torch._C._current_graph_task_id
    torch._C._current_graph_task_id = lambda: task  # checkpointing recomputes once in each
    Backward.code = _run.__code__
    try:
        with torch.no_grad():
            _run(tensors)
    finally:
        Backward.end()
        torch._C._current_graph_task_id = own_id


def _run(root: Tensor) -> None:
    missing = _num_edges(root.grad_fn)
    received: dict[Any, dict[int, Tensor]] = {root.grad_fn: {root.output_nr: torch.ones_like(root)}}
    ready = [root.grad_fn]
    while ready:
        node = ready.pop()
        Backward.enter(node)
        for (target, at), gradient in _gradients(node, received.pop(node, {})):
            if gradient is not None:
                gradient = _as_expected(gradient, target._input_metadata[at])
                own = received.setdefault(target, {})
                own[at] = own[at] + gradient if at in own else gradient
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)


def _num_edges(root: Any) -> Counter[Any]:
    """Return how many edges of the graph end in each node."""
    number: Counter[Any] = Counter()
    waiting, seen = [root], {root}
    while waiting:
        for target, _ in waiting.pop().next_functions:
            if target is not None:
                number[target] += 1
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
    return number


def _gradients(node: Any, received: dict[int, Tensor]) -> list[tuple[tuple[Any, int], Tensor | None]]:
    """Run a node; return its edges, each with a gradient. A node without gradients passes none on."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if not received:
        return [(edge, None) for edge in edges]
    given = [received.get(at) for at in range(len(node._input_metadata))]
    if hasattr(node, "variable"):
        _accumulate(node.variable, given[0])
        return []
    if isinstance(node, BackwardCFunction):
        found = node.apply(*given)
        found = found if isinstance(found, tuple) else (found,)
        # Nones may follow for arguments that were not given, as torch allows.
        needed = [
            gradient for gradient, is_needed in zip(found, node.needs_input_grad, strict=False) if is_needed
        ]
        return list(zip(edges, needed, strict=True))
    found = node(*given)
    found = found if isinstance(found, tuple) else (found,)
    return [
        (edge, gradient)
        for edge, gradient in zip(node.next_functions, found, strict=True)
        if edge[0] is not None
    ]


def _accumulate(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add up a leaf's gradient. The first is taken without a copy, as by torch if nobody else has it."""
    if gradient is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif gradient.stride() == leaf.stride():
        leaf.grad = gradient.detach()
    else:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)


def _as_expected(gradient: Tensor, expected: Any) -> Tensor:
    if gradient.shape != torch.Size(expected.shape):
        gradient = gradient.sum_to_size(tuple(expected.shape))
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)
