"""`rolemesh sft` as a person uses it: real GSM8K solutions, from rows for reinforcement learning."""

from __future__ import annotations

from pathlib import Path

from in_process import recorded, train
from launched import rolemesh, written

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.data import write_gsm8k

GSM8K = Path(__file__).parents[1] / "fixtures" / "gsm8k"


def job_of(directory: Path, model: Path, run: str) -> JobConfig:
    return make_job(
        {
            "algorithm": {"page": "sft"},
            "data": {
                "train_files": str(directory / "train.parquet"),
                "val_files": str(directory / "test.parquet"),
                "response_key": "extra_info.answer",
                "train_batch_size": 4,
                "train_max_samples": 12,
                "val_max_samples": 4,
                "max_length": 1024,
                "truncation": "right",
            },
            "actor": {
                "model": {"path": str(model)},
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 4,
                "optim": {"lr": 1e-3},
            },
            "trainer": {
                "device": "cpu",
                "total_epochs": 1,
                "save_freq": 3,
                "test_freq": 2,
                "default_local_dir": str(directory / run),
            },
        }
    )


def without_page(job: JobConfig, directory: Path) -> str:
    """Write the job file. The command names the page."""
    file = Path(written(job, directory))
    file.write_text(file.read_text().replace("page: sft", "page: null"))
    return str(file)


async def test_real_solutions_train_with_the_bits_of_an_in_process_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    write_gsm8k(GSM8K, tmp_path)
    job, same = (job_of(tmp_path, tiny_model, run) for run in ("run", "same"))
    async with rolemesh("sft", without_page(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == 0, output
    assert "3 of 3" in output

    await train(same)
    assert recorded(job) == recorded(same)
    losses = [record["val/loss"] for record in recorded(job) if "val/loss" in record]
    assert losses == sorted(losses, reverse=True)
    weights = [each.run_dir / "global_step_3" / "actor" / "model.safetensors" for each in (job, same)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
