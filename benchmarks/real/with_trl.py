"""The job of examples/smollm2 by TRL's GRPOTrainer, in an environment that has TRL and not rolemesh.

    python -m benchmarks.real.with_trl FOLDER

FOLDER/setting.json has the job's numbers, and the prompts in the job's order. The trained model is saved as
FOLDER/model, and FOLDER/steps.json has the seconds and the mean reward of each step.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes each step's seconds and mean reward, and shows them."""

    def __init__(self) -> None:
        self.began = 0.0
        self.rewards: list[float] = []
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.rewards:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        step = {"seconds": now - self.began, "sampled": sum(self.rewards) / len(self.rewards)}
        print(f"TRL, step {state.global_step}: {step}", flush=True)
        self.steps.append(step)
        self.began = now
        self.rewards.clear()


def reward_function(path: str) -> Any:
    """`compute_score` of a file."""
    spec = spec_from_file_location("reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


def main(folder: Path) -> None:
    setting = json.loads((folder / "setting.json").read_text())
    set_seed(setting["seed"])
    watch = Watch()
    score = reward_function(setting["reward"])

    def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [
            score("larger", text, truth, {})["score"] for text, truth in zip(texts, ground_truth, strict=True)
        ]
        watch.rewards += scores
        return scores

    rows = setting["prompts_per_step"] * setting["group"]
    config = trl.GRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=setting["micro_batch"],
        gradient_accumulation_steps=rows // setting["micro_batch"],
        num_generations=setting["group"],
        max_completion_length=setting["response_tokens"],
        max_steps=setting["steps"],
        learning_rate=setting["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over tokens, as ours
        shuffle_dataset=False,  # the prompts are in the job's order
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=setting["seed"],
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = trl.GRPOTrainer(
        model=setting["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(setting["prompts"]),
        processing_class=AutoTokenizer.from_pretrained(setting["model"], padding_side="left"),
        callbacks=[watch],
    )
    watch.began = time.perf_counter()
    trainer.train()
    trainer.save_model(str(folder / "model"))
    (folder / "steps.json").write_text(json.dumps(watch.steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
