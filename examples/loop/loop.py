"""The whole training loop: GRPO, with every role in this process.

In the folder above this one, run `rolemesh demo outputs/tiny` once and then `python loop/loop.py`.

Axes: B rows (prompts times answers), P prompt tokens, T response tokens, S = P + T.
"""

from __future__ import annotations

import asyncio
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small gains nothing from more

import rolemesh
from rolemesh.algos.group_advantages import compute_grpo
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.stages.experience import fan_out, join

STEPS = 15


async def train(job: rolemesh.JobConfig) -> None:
    # A batch is a DataProto: named tensors and other columns that share axis 0.
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    order = PromptOrder(len(data), job.data)  # batch k is a function of seed and k: no iterator has a state

    # The roles are objects of this process. `rolemesh serve` puts the same objects behind gRPC.
    async with rolemesh.open_roles(job) as roles:
        for step in range(1, STEPS + 1):
            prompts = data.batch(order.rows(step))  # prompts [B, P], uid, data_source, reward_model
            rows = fan_out(prompts, job.rollout.n, job.rollout.seed, step)  # each prompt n times; seeds [B]

            # The rollout answers. Rows come as they finish; column `row` says which they are.
            parts = [part async for part in roles.rollout.generate(rows)]
            finished = rolemesh.DataProto.concat(parts)
            finished.reorder(finished["row"].argsort())
            batch = join(rows.union(finished))  # responses [B, T], response_mask [B, T], input_ids [B, S]

            # The actor says how likely the answers were. The reward says how good they are.
            batch = batch.union(await roles.actor.compute_log_probs(batch))  # old_log_probs, entropys [B, T]
            batch = batch.union(await roles.reward.compute_scores(batch))  # token_level_scores [B, T], acc [B]

            # An answer is as good as it is better than the others to its prompt.
            scores, mask = batch["token_level_scores"], batch["response_mask"]
            advantages, _ = compute_grpo(scores, mask, batch["uid"], norm_adv_by_std_in_grpo=True)
            batch["advantages"] = advantages  # [B, T]

            # The actor learns, and the rollout takes the new weights.
            metrics = await roles.actor.update(batch)
            await roles.sync_weights(step)
            print(
                f"step {step:2}  right {batch['acc'].mean().item():.3f}  "
                f"entropy {batch['entropys'][mask].mean().item():.3f}  "
                f"gradient norm {metrics['actor/grad_norm']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(train(rolemesh.load_job("tiny.yaml", [f"trainer.total_training_steps={STEPS}"])))
