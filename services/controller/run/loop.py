"""The loop: step after step of a page, and what lies between: validation, checkpoints, logs, the brakes."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.graph import observer
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.display.curves import draw_curves
from rolemesh.services.controller.display.loggers import Loggers, require_libraries
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.pages.choice import check_step, page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.run.ahead import Ahead
from rolemesh.services.controller.run.checkpoints import Checkpoints, ControllerState, course_of
from rolemesh.services.controller.run.profile import check_profile_steps, profiled
from rolemesh.services.controller.run.run_dir import MetricsFile, answers, dump, read_metrics, write_config
from rolemesh.services.controller.run.stopwatch import Stopwatch, WarmingActor, timed
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.services.controller.stages.bypass import bypassing
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling, SearchStopped
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.services.controller.stages.validation import validate
from rolemesh.tasks import gather
from rolemesh.telemetry import context
from rolemesh.telemetry.metrics import CHECKPOINT_WRITTEN


class Run:
    """One run of a job.

    Args:
        job: what to do.
        tokenizer: the model's, for prompts and dumps.
        display: shows the progress.
        status: where it is told; None: one of its own.

    Raises:
        InvalidConfig, InvalidData: the job or its data cannot be run.
    """

    def __init__(
        self,
        job: JobConfig,
        tokenizer: Any,
        display: Display | None = None,
        status: RunStatus | None = None,
    ) -> None:
        self.job = job
        self.display = display or Display()
        self.status = status or RunStatus(job.trainer.experiment_name)
        self.status.on_change = self.display.show
        self._tokenizer = tokenizer
        self._stopwatch = Stopwatch(lambda phase: self.status.set(phase=phase))
        self._kl = KLController(job.algorithm.kl_ctrl)
        self._train, self._order, total_steps = self._training_data()
        self._sampling = DynamicSampling(
            job.data.train_batch_size,
            self._prompts,
            job.algorithm.filter_groups.max_num_gen_batches,
            lambda found: self.status.set(found=found),
            lambda: self.status.stop_requested,
        )
        self._val = self._validation_data()
        self.job = with_total_steps(job, total_steps)
        self.status.total_steps = total_steps  # told to nobody yet: this may be a thread
        check_profile_steps(self.job)
        self._checkpoints = Checkpoints(job.run_dir, job.trainer.max_actor_ckpt_to_keep)
        self._saved = (0, 0)  # steps, and batches that dynamic sampling has answered
        self._answers: list[dict[str, Any]] = []
        require_libraries(job)
        self._checkpoints.chosen(job)  # an unusable one is told now, not after the roles have loaded

    def request_stop(self) -> None:
        """Lets the running step end, or dynamic sampling's round where its batch is not full yet; then a
        checkpoint is written, if the job writes any, and the run ends."""
        self.status.request_stop()

    def finished(self) -> Summary | None:
        """Return the summary if the run is already complete (its roles may be gone), else None.

        Raises:
            CheckpointFailed, InvalidConfig: the checkpoint is not readable, or of another course.
        """
        chosen = self._checkpoints.chosen(self.job)
        if chosen is None or self.job.trainer.val_only:
            return None
        step = self._checkpoints.read(chosen, self._course()).step
        if step < self.status.total_steps:
            return None
        self.status.add(*read_metrics(self.job.run_dir / "metrics.jsonl"))
        self.status.set(state=State.FINISHED, step=step)
        return self._summary()

    async def train(self, roles: Roles) -> Summary:
        """Makes the steps, from the checkpoint that trainer.resume_mode chooses, to the end or to a stop.

        Args:
            roles: workers or clients, ready; the run does not close them.

        Raises:
            RolemeshError: a step, a validation or a checkpoint failed; the last good checkpoint stays.
        """
        context.job.set(self.job.trainer.experiment_name)
        context.step.set(0)
        ahead = Ahead(roles.rollout, self._upcoming, self._max_staleness)
        self._roles = bypassing(timed(replace(roles, rollout=ahead), self._stopwatch), self.job)
        token = observer.set(self._stopwatch)
        try:
            await check_step(self.job)
            start = await self._begin()
            with Loggers(self.job, start, self.display.console) as loggers:
                metrics_file = MetricsFile(self.job.run_dir / "metrics.jsonl", start)
                self._log_to = (metrics_file, loggers)
                self.status.add(*metrics_file.records)
                try:
                    async with aclosing(ahead):
                        await self._make_steps(start)
                finally:
                    metrics_file.close()
                    draw_curves(self.status.records, self.job.run_dir / "curves.png", self.status.job)
            self.status.set(state=State.FINISHED, phase="")
        except BaseException:
            self.status.set(state=State.FAILED)
            raise
        finally:
            observer.reset(token)
        return self._summary()

    # ----------------------------------------------------------------------------------- the course

    async def _begin(self) -> int:
        """Brings roles and run directory to where the run begins; returns the steps already made."""
        chosen = self._checkpoints.chosen(self.job)
        write_config(self.job)
        self._checkpoints.clear_partial()
        start = 0
        if chosen:
            self.display.console.print(f"goes on from {chosen}", style="dim", highlight=False, soft_wrap=True)
            state = await self._checkpoints.load(chosen, self._roles, self._course())
            self._kl.load_state_dict(state.kl_controller)
            self._sampling.restore(state.num_batches, state.waiting, self.job.rollout.n, state.search)
            self._saved = (state.step, state.num_batches)
            start = state.step
        else:  # roles may have been trained by a controller that ended before its first checkpoint
            await gather(self._roles.actor.load_checkpoint(None), self._roles.critic.load_checkpoint(None))
        CHECKPOINT_WRITTEN.set(chosen.stat().st_mtime if chosen else time.time())
        await self._roles.sync_weights(start)
        self._stopwatch.take()
        self.status.set(state=State.RUNNING, step=start)
        return start

    async def _make_steps(self, start: int) -> None:
        trainer = self.job.trainer
        if trainer.val_only or (trainer.val_before_train and start == 0 and self._val):
            self._log(start, await self._validate(start))
        last = start if trainer.val_only else self.status.total_steps
        for number in range(start + 1, last + 1):
            if not await self.status.may_begin():
                break
            try:
                with profiled(number, self.job):
                    await self._make_step(number)
            except SearchStopped:
                self.status.set(found="")
                break
        # stopped between two saves, or in a search
        if trainer.save_freq > 0 and (self.status.step, self._sampling.num_batches) > self._saved:
            async with self._checkpoints.writing(self._roles, self._state(self.status.step)):
                pass

    async def _make_step(self, number: int) -> None:
        context.step.set(number)
        metrics = await self._train_on(number)
        if self._val and self._due(number, self.job.trainer.test_freq):
            metrics |= await self._validate(number)
        save_freq = self.job.trainer.save_freq
        if self._due(number, save_freq) or (save_freq > 0 and self.status.stop_requested):
            await self._save(number, metrics)
        else:
            self._log(number, metrics)

    async def _train_on(self, number: int) -> Metrics:
        """The page, on the prompts of this step."""
        began = time.perf_counter()
        step = Step(number, self.job, self._kl, self._sampling)
        dynamic = self.job.algorithm.filter_groups.enable  # a step then takes as many batches as it needs
        position = self._sampling.num_batches - self._sampling.search.num_rounds + 1 if dynamic else number
        prompts = self._sampling.next_prompts() if dynamic else self._prompts(number)
        roles = self._roles
        if number <= self.job.trainer.critic_warmup:
            roles = replace(roles, actor=WarmingActor(roles.actor))
        metrics = await page_of(self.job)(prompts, roles, step)
        seconds = time.perf_counter() - began

        batch = step.batch
        assert batch is not None, "a page ends with step.report"
        if self.job.algorithm.use_kl_in_reward:
            self._kl.update(metrics["actor/reward_kl_penalty"], len(batch))
        dump(answers(batch, number, self._tokenizer), self.job.trainer.rollout_data_dir, number)
        return {
            "training/epoch": float(self._order.epoch(position)),
            **metrics,
            **self._stopwatch.take(),
            "timing_s/step": seconds,
            "perf/throughput": metrics["perf/total_num_tokens"] / seconds,
        }

    async def _validate(self, number: int) -> Metrics:
        assert self._val is not None
        prompts = self._val.batches(self.job.data.val_batch_size)
        with self._stopwatch("testing"):
            batch, metrics = await validate(prompts, self._roles, self.job)
        rows = answers(batch, number, self._tokenizer)
        dump(rows, self.job.trainer.validation_data_dir, number)
        self._answers = rows[: self.job.trainer.log_val_generations]
        return metrics | {"timing_s/testing": self._stopwatch.take()["timing_s/testing"]}

    async def _save(self, number: int, metrics: Metrics) -> None:
        """Save a checkpoint. The record is logged before the checkpoint is committed, so a resumed run always
        finds it, wherever this process was killed."""
        began = time.perf_counter()
        with self._stopwatch("save_checkpoint"):
            async with self._checkpoints.writing(self._roles, self._state(number)):
                self._log(number, metrics | {"timing_s/save_checkpoint": time.perf_counter() - began})
        self._stopwatch.take()  # this step's record has it
        self._saved = (number, self._sampling.num_batches)
        CHECKPOINT_WRITTEN.set_to_current_time()

    def _log(self, number: int, metrics: Metrics) -> None:
        metrics_file, loggers = self._log_to
        record = metrics_file.log(number, metrics)
        loggers.log(number, metrics)
        self.status.set(step=number)
        self.status.add(record)

    # --------------------------------------------------------------------------------------- pieces

    def _due(self, number: int, every: int) -> bool:
        """Every so many steps and at the end of the course."""
        return every > 0 and (number == self.status.total_steps or number % every == 0)

    def _training_data(self) -> tuple[PromptDataset, PromptOrder, int]:
        job = self.job
        if not job.data.train_files:
            raise InvalidConfig("data.train_files is empty: name one Parquet file or several")
        data = PromptDataset(job.data.train_files, job.data, self._tokenizer)
        order = PromptOrder(len(data), job.data)
        return data, order, job.trainer.total_training_steps or order.total_steps(job.trainer.total_epochs)

    def _validation_data(self) -> PromptDataset | None:
        job = self.job
        if job.data.val_files:
            return PromptDataset(job.data.val_files, job.data, self._tokenizer, split="val")
        if job.trainer.val_only or job.trainer.test_freq > 0:
            raise InvalidConfig(
                "trainer.val_only or test_freq asks for validation, and data.val_files is empty"
            )
        return None

    def _prompts(self, batch: int) -> DataProto:
        return self._train.batch(self._order.rows(batch))

    def _upcoming(self, number: int, sampling: str) -> DataProto | None:
        """The rows that step `number` will ask the rollout for; None where it will not be made."""
        if number > self.status.total_steps or self.status.stop_requested:
            return None
        rollout = self.job.rollout
        return fan_out(self._prompts(number), rollout.sampling[sampling].n, rollout.seed, number, sampling)

    @property
    def _max_staleness(self) -> int:
        return self.job.trainer.max_staleness if self.job.rollout.mode == "async" else 0

    def _course(self) -> dict[str, Any]:
        return course_of(self.job, len(self._train))

    def _state(self, step: int) -> ControllerState:
        sampling = self._sampling
        return ControllerState(
            step,
            self._kl.state_dict(),
            self._course(),
            sampling.num_batches,
            asdict(sampling.search),
            sampling.waiting,
        )

    def _summary(self) -> Summary:
        return Summary(
            run_dir=self.job.run_dir,
            step=self.status.step,
            # A run that only validates has none before it.
            total_steps=self.status.step if self.job.trainer.val_only else self.status.total_steps,
            records=self.status.records,
            answers=self._answers,
            checkpoint=self._checkpoints.latest(),
            rollout_dumps=_path(self.job.trainer.rollout_data_dir),
            validation_dumps=_path(self.job.trainer.validation_data_dir),
        )


def with_total_steps(job: JobConfig, total_steps: int) -> JobConfig:
    """The job with its number of steps said: schedules of the roles count against it."""
    trainer = job.trainer.model_copy(update={"total_training_steps": total_steps})
    return job.model_copy(update={"trainer": trainer})


def _path(directory: str | None) -> Path | None:
    return Path(directory) if directory else None
