"""The engine vllm on a GPU: its rows beside the trainer's, and its weights after updates."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from benchmarks.gpu.workload import DTYPES, Missed, Skipped, check, keep
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.sampling import log_distribution
from rolemesh.services.rollout.engines.vllm.engine import VllmEngine
from rolemesh.weights.published import PublishedWeights

ROWS = 32
P = 16
T = 48
PLAIN = SamplingConfig()
KEPT = {"top_k": 20, "top_p": 0.9, "temperature": 0.8}
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,  # logits with a standard deviation above 1
}
# The shapes of Qwen2.5-0.5B.
HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SIZES: dict[str, Mapping[str, Any]] = {"cuda": HALF_BILLION, "cpu": SMALL}
UPDATES = 10
MODELS = (  # of the updates
    (LlamaConfig, False, "float32"),
    (Qwen3Config, True, "bfloat16"),
)


# -------------------------------------------------------------------------------- models, jobs and rows


def need_vllm() -> None:
    """Raise Skipped without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed in this Python")


def write_model(
    directory: Path, config_class: type[PreTrainedConfig], sizes: Mapping[str, Any], device: str
) -> Path:
    """Write a model with random weights, and the byte-level tokenizer, whose ids are its first."""
    tokenizer = byte_tokenizer()
    config = config_class(
        **sizes, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def vllm_job(model: Path, device: str, dtype: str, **rollout: Any) -> JobConfig:
    """A job whose engine is vllm."""
    given = {"name": "vllm", "dtype": dtype, "ignore_eos": True, "gpu_memory_utilization": 0.2}
    return make_job(
        {
            "actor": {"model": {"path": str(model), "dtype": dtype}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            "rollout": {**given, **rollout},
            "trainer": {"device": device},
            "placement": {"strategy": "collocate"},  # alone on its GPU an engine never sleeps
        }
    )


def compiled(dtype: str) -> dict[str, bool]:
    """In float32 without compilation and graphs, which take half a minute; so each part tries both ways."""
    return {"enforce_eager": dtype == "float32"}


def in_float32(job: JobConfig) -> Any:
    """The job's model in transformers, on its device."""
    model = AutoModelForCausalLM.from_pretrained(job.actor.model.path, dtype=torch.float32)
    return model.to(job.trainer.device)


def prompts_of(rows: int) -> DataProto:
    """Prompts of uneven lengths, with a seed each."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, P + 1, (rows,), generator=generator)
    mask = torch.arange(P) >= P - lengths[:, None]
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, 256)
    return DataProto({"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919})


async def generated(engine: VllmEngine, prompts: DataProto, sampling: SamplingConfig) -> DataProto:
    """All rows, in the order of the prompts."""
    answer = DataProto.concat([rows async for rows in engine.generate(prompts, sampling)])
    ordered: DataProto = answer[answer["row"].argsort()]
    return ordered


def whole(prompts: DataProto, answer: DataProto) -> DataProto:
    """The rows as the trainer takes them."""
    mask = torch.cat([prompts["prompt_mask"], answer["response_mask"]], 1).long()
    kept = {"kept_ids": answer["kept_ids"]} if "kept_ids" in answer.tensors else {}
    return DataProto(
        {
            "input_ids": torch.cat([prompts["prompts"], answer["responses"]], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": answer["response_mask"],
            **kept,
        }
    )


@torch.no_grad()
def distributions(model: Any, rows: DataProto, sampling: SamplingConfig) -> Tensor:
    """[B, T, V] log-probabilities by one forward pass of transformers on the GPU, in float64."""
    inputs = {name: rows[name].to(model.device) for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits[:, P - 1 : -1].float()
    return log_distribution(logits.flatten(0, 1), sampling).view(len(rows), T, -1)


def of_sampled(found: Tensor, answer: DataProto) -> Tensor:
    """[B, T] of the sampled tokens, from [B, T, V]."""
    return found.gather(2, answer["responses"].to(found.device)[..., None])[..., 0].float().cpu()


def far(one: Tensor, other: Tensor, mask: Tensor) -> dict[str, float]:
    difference = (one - other).abs()[mask]
    return {"max": float(difference.max()), "mean": float(difference.mean())}


# ------------------------------------------------------------------------------------------- the parts


def numbers(device: str, directory: Path) -> dict[str, Any]:
    """Log-probabilities beside transformers' and the trainer's, the tokens that could be sampled, and seeds."""
    need_vllm()
    model = write_model(directory / "model", LlamaConfig, SMALL, device)
    figures: dict[str, Any] = {}
    for dtype in DTYPES[device]:
        figures[dtype] = asyncio.run(compared(vllm_job(model, device, dtype, **KEPT, **compiled(dtype))))
        keep(directory, figures)
    exact = figures["float32"]
    wrong = [f"float32 {name}" for name in ("plain", "kept", "trainer") if exact[name]["max"] >= 1e-3]
    if rounded := figures.get("bfloat16"):
        wrong += [f"bfloat16 {name}" for name in ("plain", "trainer") if rounded[name]["mean"] >= 0.02]
    wrong += ["kept ids"] if exact["kept_ids_that_differ"] > 1e-3 else []
    wrong += [f"{dtype} seeds" for dtype, each in figures.items() if each["same_tokens_again"] < 1]
    if wrong or exact["same_tokens_alone"] < 1:
        raise Missed(f"not as wanted: {', '.join(wrong) or 'the tokens of a row alone'}", figures)
    return figures


async def compared(job: JobConfig) -> dict[str, Any]:
    prompts = prompts_of(ROWS)
    began = time.perf_counter()
    engine = load_engine(job, None)  # type: ignore[arg-type]  # this engine needs no worker
    figures: dict[str, Any] = {"start_seconds": time.perf_counter() - began}
    assert isinstance(engine, VllmEngine)
    plain = await generated(engine, prompts, PLAIN)
    again = await generated(engine, prompts, PLAIN)
    alone = await generated(engine, prompts[4:5], PLAIN)
    kept = await generated(engine, prompts, job.rollout)
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(job.actor.model.path, dtype=torch.float32).to(
        job.trainer.device
    )
    for name, answer, sampling in (("plain", plain, PLAIN), ("kept", kept, job.rollout)):
        expected = distributions(model, whole(prompts, answer), sampling)
        mask = answer["response_mask"]
        off = of_sampled(expected, answer) - answer["rollout_log_probs"]
        finite = off.isfinite()  # in bfloat16 a token may be kept that float32 cuts off
        figures[name] = far(off, torch.zeros_like(off), mask & finite)
        figures[name] |= {"infinite": int((mask & ~finite).sum()), "tokens": int(mask.sum())}
    could = expected.isfinite().cpu()
    ids = kept["kept_ids"].long()
    listed = torch.zeros_like(could).scatter_(2, ids.clamp(min=0), ids >= 0)
    listed[..., 0] |= (ids == 0).any(-1)
    listed[..., 0] &= (ids == 0).any(-1)
    figures["kept_ids_that_differ"] = float((listed != could).any(-1).float().mean())
    figures["kept_ids"] = float(could.sum(-1).float().mean())
    actor = ActorWorker(job)
    trained = (await actor.compute_log_probs(whole(prompts, kept)))["old_log_probs"]
    actor.close()
    figures["trainer"] = far(trained, kept["rollout_log_probs"], kept["response_mask"])
    exact = of_sampled(expected, kept)
    mask = kept["response_mask"] & exact.isfinite()
    figures["trainer beside float32"] = far(trained, exact, mask)
    same = (plain["responses"] == again["responses"]).all(1)
    figures["same_tokens_again"] = float(same.float().mean())
    figures["same_tokens_alone"] = float((plain["responses"][4:5] == alone["responses"]).float().mean())
    return figures


def updates(device: str, directory: Path) -> dict[str, Any]:
    """Ten updates of each model, read back bit for bit, and a swap while rows are generated."""
    need_vllm()
    figures: dict[str, Any] = {}
    for config_class, is_tied, dtype in MODELS:
        dtype = dtype if dtype in DTYPES[device] else "float32"
        name = f"{config_class.model_type}, {'tied' if is_tied else 'untied'}, {dtype}"
        sizes = {**SMALL, "tie_word_embeddings": is_tied}
        path = write_model(directory / config_class.model_type, config_class, sizes, device)
        figures[name] = asyncio.run(updated(vllm_job(path, device, dtype, max_num_seqs=64, **compiled(dtype))))
        keep(directory, figures)
    for name, each in figures.items():
        bound = 1e-3 if name.endswith("float32") else 0.3
        wrong = [key for key, value in each["log_probs"].items() if not value < bound]
        if each["differing"] or wrong:
            raise Missed(f"{name}: {each['differing']} differ; log-probs of {wrong}", figures)
    return figures


async def updated(job: JobConfig) -> dict[str, Any]:
    engine = load_engine(job, None)  # type: ignore[arg-type]
    assert isinstance(engine, VllmEngine)
    dtype = getattr(torch, job.rollout.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.actor.model.path, dtype=torch.float32).to(
        job.trainer.device
    )
    prompts = prompts_of(8)
    figures: dict[str, Any] = {"seconds": [], "differing": [], "log_probs": {}}
    for version in range(1, UPDATES + 1):
        weights = change(model, version)
        held = await PublishedWeights(version, weights, dtype=dtype).fetch()
        began = time.perf_counter()
        await engine.load_weights(version, held)
        figures["seconds"].append(time.perf_counter() - began)
        read = await engine.read_weights()
        wanted = {name: weight.to(dtype).cpu() for name, weight in weights.items()}
        figures["differing"] += sorted(read.keys() ^ wanted.keys())
        figures["differing"] += [
            f"{version}: {name}" for name in read if not torch.equal(read[name], wanted[name])
        ]
        answer = await generated(engine, prompts, PLAIN)
        check(
            bool((answer["weight_versions"] == version).all()), f"rows of {answer['weight_versions'].unique()}"
        )
        expected = of_sampled(distributions(model, whole(prompts, answer), PLAIN), answer)
        off = far(expected, answer["rollout_log_probs"], answer["response_mask"])
        figures["log_probs"][f"version {version}"] = off["max"]
    figures["swap"] = await swapped(engine, model, dtype, figures["log_probs"])
    engine.close()
    return figures


async def swapped(
    engine: VllmEngine, model: Any, dtype: torch.dtype, log_probs: dict[str, float]
) -> dict[str, Any]:
    """Load a version while 400 rows are generated. Each token must be of the version that it names."""
    prompts = prompts_of(400)
    before = UPDATES
    expected = {}
    answers = []
    seconds = 0.0
    async with aclosing(engine.generate(prompts, PLAIN)) as stream:
        answers.append(await anext(stream))
        old = {name: weight.detach().clone() for name, weight in named_weights(model).items()}
        held = await PublishedWeights(before + 1, change(model, before + 1), dtype=dtype).fetch()
        new = {name: weight.detach().clone() for name, weight in named_weights(model).items()}
        began = time.perf_counter()
        swap = asyncio.create_task(engine.load_weights(before + 1, held))
        answers += [rows async for rows in stream]
        await swap
        seconds = time.perf_counter() - began
    answer = DataProto.concat(answers)
    prompts = prompts[answer["row"]]
    versions = answer["weight_versions"]
    mask = answer["response_mask"]
    own = named_weights(model)
    for version, weights in ((before, old), (before + 1, new)):
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
        found = of_sampled(distributions(model, whole(prompts, answer), PLAIN), answer)
        here = mask & (versions == version)
        if here.any():
            log_probs[f"swap, version {version}"] = far(found, answer["rollout_log_probs"], here)["max"]
        expected[version] = int(here.any(1).sum())
    after = await generated(engine, prompts_of(8), PLAIN)
    check(bool((after["weight_versions"] == before + 1).all()), "rows after the swap are of another version")
    return {"seconds": seconds, "rows": len(answer), "rows_of_version": expected}


@torch.no_grad()
def change(model: Any, seed: int) -> dict[str, Tensor]:
    """Add noise to a model's weights; return them."""
    generator = torch.Generator(model.device).manual_seed(seed)
    weights = named_weights(model)
    for weight in weights.values():
        weight += 0.01 * torch.randn(weight.shape, generator=generator, device=model.device)
    return weights
