"""PF-PPO's stage of a step: resample the rows to train on."""

from __future__ import annotations

from rolemesh.algos.resampling import draw_rows, resampling_weights
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.graph import node
from rolemesh.roles import Metrics


def _reads(job: JobConfig) -> tuple[str, ...]:
    return ("token_level_scores", *_writes(job)) if job.algorithm.use_pf_ppo else ()


def _writes(job: JobConfig) -> tuple[str, ...]:
    return ("advantages", "returns") if job.algorithm.use_pf_ppo else ()  # and every other column


@node(reads=_reads, writes=_writes, phase="adv")
def resample(batch: DataProto, job: JobConfig, step: int) -> tuple[DataProto, Metrics]:
    """Draw B rows to train on by their scores, with `algorithm.use_pf_ppo`; else return the batch.

    Args:
        batch: [B] rows with advantages and returns, which were computed before resampling.
        job: has algorithm.use_pf_ppo and algorithm.pf_ppo.
        step: number of the step.

    Returns:
        [B] rows, with repetitions; and a metric, the share of the batch's rows that were drawn.
    """
    if not job.algorithm.use_pf_ppo:
        return batch, {}
    pf_ppo = job.algorithm.pf_ppo
    scores = batch["token_level_scores"].double().sum(dim=1)  # rounded sums of equal scores may differ
    weights = resampling_weights(scores, method=pf_ppo.reweight_method, power=pf_ppo.weight_pow)
    rows = draw_rows(weights, job.rollout.seed, step)
    return batch.select_idxs(rows), {"actor/share_of_rows_drawn": len(set(rows.tolist())) / len(rows)}
