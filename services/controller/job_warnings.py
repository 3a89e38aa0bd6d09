"""Warnings about a job before its run: it can be run, but perhaps is not what its author means."""

from __future__ import annotations

import logging

from rolemesh.config import JobConfig

log = logging.getLogger(__name__)


def warn_of_unused_keys(job: JobConfig) -> None:
    """Log a warning for each key that the job file sets without effect."""
    for unused in job.unused_keys():
        if unused.is_set:
            log.warning("%s has no effect: %s", unused.key, unused.reason)


def warn_of_no_checkpoint(job: JobConfig) -> None:
    """Log a warning if the run trains and saves nothing, so that the trained model ends with the run."""
    trainer = job.trainer
    if trainer.save_freq < 1 and not trainer.save_best and not trainer.val_only:
        log.warning(
            "no checkpoint will be written, and the trained model is lost at the end, as trainer.save_freq is "
            "%d; set it to N to save every N steps and after the last",
            trainer.save_freq,
        )


def warn_of_untrained_actor(job: JobConfig) -> None:
    """Log a warning if every step of the run is one of trainer.critic_warmup.

    Args:
        job: with its number of steps.
    """
    warmup = job.trainer.critic_warmup
    steps = job.trainer.total_training_steps
    if steps is not None and warmup >= steps and not job.trainer.val_only:
        log.warning(
            "trainer.critic_warmup is %d, and the run has %d steps, so none of them trains the actor; make "
            "critic_warmup smaller, or the run longer",
            warmup,
            steps,
        )


def warn_of_stale_rows(job: JobConfig) -> None:
    """Log a warning if generation runs ahead, and the loss neither clips nor weighs tokens of older weights.

    Log another one if the job does not say how far ahead: a job of verl has mode async, and means a server.
    """
    if job.steps_ahead and "max_staleness" not in job.trainer.model_fields_set:
        log.warning(
            "rollout.mode is async, so rows are generated ahead of training, with older weights (in verl the "
            "word names a server, and the weights are the newest); set rollout.mode to sync, or "
            "trainer.max_staleness (%d) to say how many steps ahead",
            job.steps_ahead,
        )
    correction = job.algorithm.rollout_correction
    loss = job.policy_loss
    weighs = loss.has_ratio and not (loss.corrects and correction.is_plain_reinforce)
    if job.steps_ahead and not weighs and correction.rollout_is is None:
        log.warning(
            "rollout.mode is async, so tokens are of weights up to %d step%s older than those that learn from "
            "them, but the policy loss (%s) has neither a clip nor an importance weight; set "
            "algorithm.rollout_correction.rollout_is to token, or trainer.max_staleness to 0",
            job.steps_ahead,
            "s" * (job.steps_ahead > 1),
            loss.name,
        )
