"""Tokens per second of the engine vllm, beside vLLM without Rolemesh."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from benchmarks.gpu.vllm_rows import SIZES, need_vllm, write_model
from benchmarks.gpu.workload import DTYPES, Missed, check, keep
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.rollout.engines.vllm.engine_args import prepare_environment
from rolemesh.services.rollout.worker import RolloutWorker

P = 32
T = 256
ROWS = {"cuda": (256, 1024), "cpu": (4, 8)}
ROUNDS = 3
WANTED = 0.9  # of vLLM's own tokens per second
SHARE = 0.35  # of the memory, for each of the two


def decoding(device: str, directory: Path) -> dict[str, Any]:
    """0.5e9 parameters in bfloat16: rows of 256 tokens through the rollout worker, and by vllm.LLM.

    The two are interleaved. `vLLM` makes the same requests (seeds and log-probabilities), which sets the wanted
    ratio; `vLLM, tokens alone` shows what these cost. The worker also makes the columns of the answer.
    """
    need_vllm()
    model = write_model(directory / "model", Qwen2Config, SIZES[device], device)
    job = job_of(model, device)
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    prepare_environment(torch.device(device))
    from vllm import LLM, SamplingParams

    bare = LLM(
        model=str(model),
        dtype=DTYPES[device][-1],
        max_model_len=P + T,
        max_num_seqs=max(ROWS[device]),
        max_num_batched_tokens=job.rollout.max_num_batched_tokens,
        gpu_memory_utilization=SHARE,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        enforce_eager=device == "cpu",
        disable_log_stats=True,
    )

    def by_vllm(prompts: DataProto, alone: bool) -> int:
        own = [
            SamplingParams(
                max_tokens=T,
                ignore_eos=True,
                detokenize=False,
                **({} if alone else {"seed": seed, "logprobs": 0, "flat_logprobs": True}),
            )
            for seed in prompts["seeds"].tolist()
        ]
        given: Any = [{"prompt_token_ids": ids} for ids in prompts["prompts"].tolist()]
        return sum(len(row.outputs[0].token_ids) for row in bare.generate(given, own, use_tqdm=False))

    async def contest() -> dict[str, Any]:
        rollout = RolloutWorker(job)

        async def by_worker(prompts: DataProto) -> int:
            return sum([int(part["response_mask"].sum()) async for part in rollout.generate(prompts)])

        seconds: dict[str, list[float]] = defaultdict(list)
        for round_ in range(ROUNDS + 1):
            for rows in ROWS[device]:
                prompts = prompts_of(rows, round_)
                for name in ("ours", "vLLM", "vLLM, tokens alone"):
                    began = time.perf_counter()
                    if name == "ours":
                        tokens = await by_worker(prompts)
                    else:
                        tokens = by_vllm(prompts, alone=name != "vLLM")
                    check(tokens == rows * T, f"{name}: {tokens} tokens")
                    seconds[f"{name}, {rows} rows"].append(time.perf_counter() - began)
                    keep(directory, {"seconds": seconds})
        rollout.close()
        return {name: values[1:] for name, values in seconds.items()}

    seconds = asyncio.run(contest())
    rates = {name: int(name.split()[-2]) * T / statistics.median(values) for name, values in seconds.items()}
    ratios = {rows: rates[f"ours, {rows} rows"] / rates[f"vLLM, {rows} rows"] for rows in ROWS[device]}
    figures = {"seconds": seconds, "tokens_per_second": rates, "ratio": {str(n): r for n, r in ratios.items()}}
    if min(ratios.values()) < WANTED:
        raise Missed(f"of vLLM's own speed: {ratios}; wanted {WANTED}", figures)
    return figures


def job_of(model: Path, device: str) -> JobConfig:
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            "rollout": {
                "name": "vllm",
                "ignore_eos": True,
                "max_num_seqs": max(ROWS[device]),
                "gpu_memory_utilization": SHARE,
            },
            "trainer": {"device": device},
        }
    )


def prompts_of(rows: int, seed: int) -> DataProto:
    """Other prompts for each seed, so that no contestant finds another round's in its prefix cache."""
    generator = torch.Generator().manual_seed(seed)
    columns = {
        "prompts": torch.randint(200, (rows, P), generator=generator),
        "prompt_mask": torch.ones(rows, P, dtype=torch.bool),
        "seeds": torch.arange(rows) + 10_000 * seed,
    }
    return DataProto(columns, {}, {"sampling": "train"})
