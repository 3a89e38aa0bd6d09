"""The models, rows and jobs that the parts work on; small on a CPU, where only the code is tried."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import byte_tokenizer

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Scale:
    """Sizes of a part.

    Args:
        hidden, layers, vocabulary: of the model; the MLP is 2.75 times as wide.
        rows, prompt, response: of a batch; every row has its full length.
        micro: rows of a pass.
    """

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    prompt: int
    response: int
    micro: int


CORRECT = {"cuda": Scale(256, 4, 2048, 12, 24, 40, 4), "cpu": Scale(128, 2, 512, 8, 8, 16, 4)}
SPEED = {"cuda": Scale(2048, 8, 32768, 64, 256, 768, 16), "cpu": Scale(128, 2, 512, 8, 16, 48, 4)}

DTYPES = {"cuda": ("float32", "bfloat16"), "cpu": ("float32",)}  # few processors multiply in bfloat16


def make_model(directory: Path, scale: Scale) -> Path:
    """A random Llama with shared heads of keys, and the byte-level tokenizer, whose ids are its first."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.hidden * 11 // 4,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.hidden // 64,
        num_key_value_heads=max(1, scale.hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def job_of(
    directory: Path, model: Path, scale: Scale, device: str, sections: Mapping[str, Any] | None = None
) -> JobConfig:
    """PPO with a reference, one mini-batch a step, in bfloat16 on a GPU and float32 on a CPU."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    plain = {"enable_gradient_checkpointing": False, "dtype": dtype}
    trained = {"ppo_mini_batch_size": scale.rows, "ppo_micro_batch_size_per_gpu": scale.micro, "ppo_epochs": 1}
    given = {
        "algorithm": {"use_kl_in_reward": True},
        "data": {
            "train_files": str(directory / "data" / "train.parquet"),
            "train_batch_size": scale.rows,
            "max_prompt_length": scale.prompt,
            "max_response_length": scale.response,
        },
        "actor": {"model": {"path": str(model), **plain}, **trained, "optim": {"lr": 1e-5}},
        "critic": {"model": plain, **trained},
        "reference": {"model": plain, "log_prob_micro_batch_size_per_gpu": scale.micro},
        "rollout": {"ignore_eos": True, "max_num_seqs": scale.rows, "dtype": dtype},
        "trainer": {"device": device, "default_local_dir": str(directory / "run")},
    }
    return make_job(merge(given, dict(sections or {})))


def rows_of(scale: Scale, *, uneven: bool, seed: int = 0) -> DataProto:
    """Random rows on the CPU, of full or of uneven length, two with each prompt; with columns of experience."""
    generator = torch.Generator().manual_seed(seed)
    width = scale.prompt + scale.response
    prompts = torch.randint(200, (scale.rows // 2, scale.prompt), generator=generator).repeat_interleave(2, 0)
    responses = torch.randint(200, (scale.rows, scale.response), generator=generator)
    begins = torch.zeros(scale.rows)
    ends = torch.full((scale.rows,), float(width))
    if uneven:
        begins = torch.randint(scale.prompt, (scale.rows // 2,), generator=generator).repeat_interleave(2)
        ends = scale.prompt + torch.randint(1, scale.response + 1, (scale.rows,), generator=generator)
    column = torch.arange(width)
    mask = (column >= begins[:, None]) & (column < ends[:, None])
    normal = [torch.randn(scale.rows, scale.response, generator=generator) for _ in range(4)]
    sampled = mask[:, scale.prompt :]
    return DataProto(
        {
            "input_ids": torch.where(mask, torch.cat([prompts, responses], 1), 256),
            "attention_mask": mask.long(),
            "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
            "response_mask": sampled,
            "old_log_probs": -7.0 * sampled + 0.1 * normal[0] * sampled,
            "ref_log_probs": -7.0 * sampled,
            "advantages": normal[1],
            "values": normal[2] * sampled,
            "returns": normal[3],
        }
    )


def prompts_of(scale: Scale) -> DataProto:
    """The prompts of rows_of's rows, for a rollout."""
    columns = {
        "prompts": rows_of(scale, uneven=False)["input_ids"][:, : scale.prompt],
        "prompt_mask": torch.ones(scale.rows, scale.prompt, dtype=torch.bool),
        "seeds": torch.arange(scale.rows),
    }
    return DataProto(columns, {}, {"sampling": "train"})


def synchronized(device: str) -> float:
    """The time, when all that was begun on the device has ended."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check(holds: bool, what: str) -> None:
    """Fail the part unless something holds."""
    if not holds:
        raise AssertionError(what)


def keep(directory: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures so far; they count if the part is killed before it ends."""
    (directory / "so_far.part").write_text(json.dumps(figures))
    (directory / "so_far.part").replace(directory / "so_far.json")


class Missed(AssertionError):
    """A figure is not what is wanted; all figures of the part are kept.

    Args:
        what: which one, and its value.
        figures: of the part.
    """

    def __init__(self, what: str, figures: dict[str, Any]) -> None:
        super().__init__(what)
        self.figures = figures


class Skipped(Exception):
    """A part cannot run here; the message says why."""
