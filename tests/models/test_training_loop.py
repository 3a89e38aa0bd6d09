"""What an update reports of its micro-batches and mini-batches, by hand, and the policy that it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn, tensor

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.config.model import OptimConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.ranks.ranks import Ranks
from rolemesh.training.optimizer import Optimizer
from rolemesh.training.update_loop import Schedule, learn, train


def test_metrics_combine_as_sums_token_means_and_extremes() -> None:
    """Two mini-batches of two rows, a micro-batch each. Rows 1 and 3 have 0 and 1 tokens, rows 2 and 6 have 1
    and 3: their means are 3/1 and (2 + 3·6)/4."""
    batch = DataProto(
        {
            "x": tensor([[1.0], [3.0], [2.0], [6.0]]),
            "num_tokens": tensor([0, 1, 1, 3]),
            "attention_mask": torch.ones(4, 1, dtype=torch.int64),
            "position_ids": torch.zeros(4, 1, dtype=torch.int64),
            "response_mask": torch.ones(4, 1, dtype=torch.bool),
        }
    )
    model = nn.Linear(1, 1)

    def loss_of(rows: DataProto, mini_batch: BatchCounts) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        x, num_tokens = rows["x"].sum(), rows["num_tokens"].sum()
        rows["seen"] = rows["x"] * 10
        return model(rows["x"]).sum(), {"loss": x, "kl": TokenMean(x * num_tokens, num_tokens)}

    def report(rows: DataProto) -> dict[str, float]:
        least, greatest = rows["seen"].aminmax()
        shares = {"w_min": least.item(), "w_max": greatest.item(), "w": rows["seen"].mean().item()}
        return shares if least < 20 else shares | {"late": 5.0}

    optimizer = Optimizer(model, OptimConfig(lr=0.5), grad_clip=1.0, role="actor")
    micro_batches = MicroBatches(1, None, False, balanced=False)
    schedule = Schedule(2, micro_batches, epochs=1, shuffle=False, seed=0)

    def learn_alone(mini_batch: DataProto, counts: BatchCounts) -> list[DataProto]:
        part = DataProto(mini_batch.tensors, meta_info={"mini_batch": counts})
        return [learn(part, model, optimizer, micro_batches, Ranks.alone(), loss_of, ["seen"])]

    metrics = train(batch, optimizer, schedule, learn_alone, report=report)
    assert metrics.pop("grad_norm") > 0
    assert metrics == pytest.approx(
        {
            "loss": (4 + 8) / 2,
            "kl": (3 + 20 / 4) / 2,
            "w": (20 + 40) / 2,
            "w_min": 10,
            "w_max": 60,
            "late": 5,
            "lr": 0.5,
        }
    )


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    ("kind", "noise"),
    [("Mixtral", {}), ("Phimoe", {"input_jitter_noise": 0.1}), ("Phimoe", {"input_jitter_noise": 0.0})],
)
def test_an_update_uses_the_evaluation_policy_with_noisy_experts(
    kind: str, noise: dict[str, float], checkpoints: bool
) -> None:
    """Both multiply the router's input by noise in training mode, and PhiMoE draws its experts there."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, **noise,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    attended, passes = [], []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: attended.append(1))

    def loss_of(rows: DataProto, mini_batch: BatchCounts) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        passes.append(model(rows["input_ids"], use_cache=False).logits)
        return passes[0].square().mean(), {}

    part = DataProto(
        {
            "input_ids": ids,
            "attention_mask": torch.ones(2, 12, dtype=torch.int64),
            "position_ids": torch.arange(12).repeat(2, 1),
            "response_mask": torch.ones(2, 11, dtype=torch.bool),
        },
        meta_info={"mini_batch": BatchCounts(22, 2, 11)},
    )
    optimizer = Optimizer(model, OptimConfig(), grad_clip=1.0, role="actor")
    learn(part, model, optimizer, MicroBatches(2, None, False, balanced=False), Ranks.alone(), loss_of)
    assert torch.equal(passes[0], expected)
    assert len(attended) == 1 + checkpoints  # once more for the backward pass
    assert not any(module.training for module in model.modules())
