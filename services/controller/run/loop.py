"""The training loop: steps of a page, with validation, checkpoints, logs and stops between them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, replace
from typing import Any

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.graph import observer
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.display.loggers import Loggers, numbers, require_libraries
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.pages.choice import check_step, page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.record import METRICS_FILE
from rolemesh.services.controller.run.ahead import Ahead
from rolemesh.services.controller.run.background_commit import BackgroundCommit
from rolemesh.services.controller.run.best import check_reported, is_best
from rolemesh.services.controller.run.checkpoints import Checkpoints, ControllerState
from rolemesh.services.controller.run.decision import named_checkpoint, start_of
from rolemesh.services.controller.run.profile import profiled
from rolemesh.services.controller.run.resume_compat import (
    NUM_PROMPTS,
    OF_THE_ROWS,
    STEPS,
    file_digests,
    settings_to_keep,
)
from rolemesh.services.controller.run.row_loading import num_steps, with_total_steps
from rolemesh.services.controller.run.run_data import RunData
from rolemesh.services.controller.run.run_dir import MetricsFile, read_metrics, write_answers, write_config
from rolemesh.services.controller.run.stopwatch import Stopwatch, WarmingActor, timed
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.services.controller.stages.advantage_estimation import REWARD_KL
from rolemesh.services.controller.stages.batch_metrics import throughput
from rolemesh.services.controller.stages.bypass import bypassing
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling, SearchStopped
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.services.controller.stages.validation import validate, validate_loss, validate_pairs
from rolemesh.tasks import gather
from rolemesh.telemetry import context
from rolemesh.telemetry.metrics import CHECKPOINT_WRITTEN

log = logging.getLogger(__name__)


class Run:
    """One run of a job.

    Args:
        job: the job.
        tokenizer: the model's, for prompts and dumps.
        display: shows the progress; None: a new one.
        status: holds the progress; None: a new one.

    Raises:
        InvalidConfig, InvalidData: the job or its data cannot be run.
        CheckpointFailed: `latest` names something that is not a checkpoint.
    """

    def __init__(
        self,
        job: JobConfig,
        tokenizer: Any,
        display: Display | None = None,
        status: RunStatus | None = None,
    ) -> None:
        self.job = self._given = job
        self.display = display or Display()
        self.status = status or RunStatus(job.trainer.experiment_name)
        self.status.on_change = self.display.show
        self._tokenizer = tokenizer
        self._data = RunData(job, tokenizer)
        self._texts = ResponseTexts(tokenizer, skip_special_tokens=job.reward.skip_special_tokens)
        self._stopwatch = Stopwatch(lambda phase: self.status.set(phase=phase))
        self._kl = KLController(job.algorithm.kl_ctrl)
        self._sampling = DynamicSampling(
            job.data.train_batch_size,
            self._data.prompts,
            job.algorithm.filter_groups.max_num_gen_batches,
            lambda found: self.status.set(found=found),
            lambda: self.status.stop_requested,
        )
        self._files = file_digests(job)  # as the roles begin with them, whatever is edited later
        self.job = with_total_steps(job, self._data.num_steps)
        self.status.total_steps = self._data.num_steps  # without a notification: this may run on another thread
        keep = job.trainer.max_actor_ckpt_to_keep
        self._checkpoints = Checkpoints(job.run_dir, keep, spared=named_checkpoint(job))
        self._saved = (0, 0)  # steps, and batches answered by dynamic sampling, at the last save
        self._commit = BackgroundCommit()
        self._answers: list[dict[str, Any]] = []
        require_libraries(job)
        start_of(job, self._checkpoints)  # fails now if unusable, not after the roles have loaded

    def request_stop(self) -> None:
        """Stop after the current step, or after the current round of dynamic sampling if its batch is not full.

        A checkpoint is then written, if the job writes any.
        """
        self.status.request_stop()

    def finished(self) -> Summary | None:
        """Return the summary if the run is already complete (its roles may be gone), else None.

        Raises:
            CheckpointFailed, InvalidConfig: the checkpoint is not readable, or of a job with other settings.
        """
        chosen = start_of(self.job, self._checkpoints).checkpoint
        if chosen is None or self.job.trainer.val_only:
            return None
        has_tools = self.job.rollout.multi_turn.enable  # whose descriptions are not in the prompts yet
        counts_rows = self._given.trainer.total_training_steps is None
        unknown: tuple[str, ...] = ()
        if has_tools:
            unknown = (*OF_THE_ROWS, STEPS) if counts_rows else OF_THE_ROWS
        state = self._checkpoints.read(chosen, self._settings_to_keep(), unknown)
        if has_tools:
            self.status.total_steps = num_steps(self._given, state.kept_settings[NUM_PROMPTS])
        if state.step < self.status.total_steps:
            return None
        if has_tools:
            self._checkpoints.warn_of_unknown_rows(chosen, state, self._settings_to_keep())
        self.status.add(*read_metrics(self.job.run_dir / METRICS_FILE))
        self.status.set(state=State.FINISHED, step=state.step)
        return self._summary()

    async def train(self, roles: Roles) -> Summary:
        """Train to the end, or until stopped, from where the run starts; see `decision.start_of`.

        Args:
            roles: workers or clients that are ready; the run does not close them.

        Raises:
            RolemeshError: a step, a validation or a checkpoint failed; the last good checkpoint is intact.
        """
        context.job.set(self.job.trainer.experiment_name)
        context.step.set(0)
        rollout = roles.rollout
        if self.job.rollout.multi_turn.enable and self.job.generates:
            await self._data.describe_tools(roles.environment)
            self.status.total_steps = self._data.num_steps
            self.job = with_total_steps(self._given, self.status.total_steps)
            rollout = ConversationRollout(rollout, roles.environment, self.job, self._tokenizer)
        ahead = Ahead(rollout, self._upcoming, self.job.steps_ahead)
        if self.job.generates:
            roles = replace(roles, rollout=ahead)
        self._roles = bypassing(timed(roles, self._stopwatch), self.job)
        token = observer.set(self._stopwatch)
        try:
            await check_step(self.job)
            start = await self._begin()
            async with Loggers(self.job, start, self.display.console) as loggers:
                makes_steps = not self.job.trainer.val_only
                metrics_file = MetricsFile(self.job.run_dir / METRICS_FILE, start, makes_steps)
                self._log_to = (metrics_file, loggers)
                self.status.add(*metrics_file.records)
                try:
                    async with aclosing(ahead), self._commit.at_end():
                        await self._make_steps(start)
                finally:
                    metrics_file.close()
            self.status.set(state=State.FINISHED, phase="")
        except BaseException as error:
            self.status.fail(error)
            raise
        finally:
            observer.reset(token)
        return self._summary()

    # ----------------------------------------------------------------------------------- resuming

    async def _begin(self) -> int | None:
        """Restore roles and run directory to the start of the run.

        Returns:
            The number of steps already made; None for a new run.
        """
        start = start_of(self.job, self._checkpoints)
        write_config(self.job)
        step = None
        total = self.status.total_steps
        if start.checkpoint:
            settings = self._settings_to_keep()
            state = await self._checkpoints.load(start.checkpoint, self._roles, settings, total)
            said = start.describe(state.step)
            self.display.console.print(said, style="dim", highlight=False, soft_wrap=True)
            self._kl.load_state_dict(state.kl_controller)
            self._sampling.restore(state.num_batches, state.waiting, self.job.rollout.n, state.search)
            self._saved = (state.step, state.num_batches)
            step = state.step
        else:  # roles may have been trained by a controller that ended before its first checkpoint
            await gather(
                self._roles.actor.load_checkpoint(None, total),
                self._roles.critic.load_checkpoint(None, total),
            )
        start.write_down()
        # After a load, no role writes for an earlier controller.
        await asyncio.to_thread(self._checkpoints.clear_partial)
        CHECKPOINT_WRITTEN.set(start.checkpoint.stat().st_mtime if start.checkpoint else time.time())
        if self.job.generates:
            await self._roles.sync_weights(step or 0)
        self._stopwatch.take()
        self.status.set(state=State.RUNNING, step=step or 0)
        return step

    async def _make_steps(self, start: int | None) -> None:
        trainer = self.job.trainer
        made = start or 0
        if trainer.val_only or (trainer.val_before_train and start is None and self._data.val):
            self._log(made, await self._validate(made))
            check_reported("" if trainer.val_only else trainer.save_best, self.status.records[-1])
        last = made if trainer.val_only else self.status.total_steps
        for number in range(made + 1, last + 1):
            if not await self.status.may_begin():
                break
            await self._commit.check()
            try:
                with profiled(number, self.job):
                    await self._make_step(number)
            except SearchStopped:
                self.status.set(found="")
                break
        # stopped between two saves, or during dynamic sampling
        if trainer.save_freq > 0 and (self.status.step, self._sampling.num_batches) > self._saved:
            await self._commit.done()
            async with self._checkpoints.writing(self._roles, self._state(self.status.step)):
                pass

    async def _make_step(self, number: int) -> None:
        context.step.set(number)
        metrics = await self._train_on(number)
        trainer = self.job.trainer
        best = False
        if self._data.val and self._due(number, trainer.test_freq):
            validation = await self._validate(number)
            best = bool(trainer.save_best) and is_best(trainer.save_best, validation, self.status.records)
            metrics |= validation
        stopping = trainer.save_freq > 0 and self.status.stop_requested
        if best or stopping or self._due(number, trainer.save_freq):
            await self._save(number, metrics, best=best)
        else:
            self._log(number, metrics)

    async def _train_on(self, number: int) -> Metrics:
        """Run the page on the prompts of this step."""
        began = time.perf_counter()
        step = Step(number, self.job, self._kl, self._sampling)
        dynamic = self.job.algorithm.filter_groups.enable  # a step may then take several batches
        position = self._sampling.num_batches - self._sampling.search.num_rounds + 1 if dynamic else number
        prompts = self._sampling.next_prompts() if dynamic else self._data.prompts(number)
        roles = self._roles
        if number <= self.job.trainer.critic_warmup:
            roles = replace(roles, actor=WarmingActor(roles.actor))
        metrics = await page_of(self.job)(prompts, roles, step)
        batch = step.batch
        assert batch is not None, "a page ends with step.report"
        if self.job.algorithm.use_kl_in_reward:
            self._kl.update(metrics[REWARD_KL], len(batch))
        if self.job.generates and (directory := self.job.trainer.rollout_data_dir):
            await write_answers(batch, number, self._texts, directory)
        seconds = time.perf_counter() - began
        return {
            "training/epoch": float(self._data.order.epoch(position)),
            **metrics,
            **self._stopwatch.take(),
            "timing_s/step": seconds,
            "perf/throughput": throughput(metrics, self.job, seconds),
        }

    async def _validate(self, number: int) -> Metrics:
        assert self._data.val is not None
        prompts = self._data.val.batches(self.job.data.val_batch_size)
        trainer = self.job.trainer
        with self._stopwatch("testing"):
            if self.job.generates:
                batch, metrics = await validate(prompts, self._roles, self.job)
                directory = trainer.validation_data_dir
                num_shown = trainer.log_val_generations
                self._answers = await write_answers(batch, number, self._texts, directory, num_shown)
            elif self.job.page.learns_from == "pairs":
                metrics = await validate_pairs(prompts, self._roles, self.job)
            else:
                metrics = await validate_loss(prompts, self._roles)
        return metrics | {"timing_s/testing": self._stopwatch.take()["timing_s/testing"]}

    async def _save(self, number: int, metrics: Metrics, *, best: bool) -> None:
        """Begin a checkpoint. It is written and committed behind the next steps; an earlier one comes first.

        The record is logged before the commit, so a resumed run always finds it.
        """
        async with AsyncExitStack() as writing:
            began = time.perf_counter()
            with self._stopwatch("save_checkpoint"):
                await self._commit.done()
                checkpoint = self._checkpoints.writing(self._roles, self._state(number), best=best)
                await writing.enter_async_context(checkpoint)
            self._stopwatch.take()  # drop it: this step's record has it already
            self._log(number, metrics | {"timing_s/save_checkpoint": time.perf_counter() - began})
            self._saved = (number, self._sampling.num_batches)
            self._commit.begin(writing.pop_all())

    def _log(self, number: int, metrics: Metrics) -> None:
        metrics_file, loggers = self._log_to
        metrics = numbers(number, metrics)
        record = metrics_file.log(number, metrics)
        loggers.log(number, metrics)
        self.status.set(step=number)
        self.status.add(record)

    # --------------------------------------------------------------------------------------- pieces

    def _due(self, number: int, every: int) -> bool:
        """Return whether something is due after this step: every `every` steps and after the last."""
        return every > 0 and (number == self.status.total_steps or number % every == 0)

    def _upcoming(self, number: int, sampling: str) -> DataProto | None:
        """Return the rows that step `number` will request from the rollout; None if it will not be made."""
        if number > self.status.total_steps or self.status.stop_requested:
            return None
        rollout = self.job.rollout
        return fan_out(self._data.prompts(number), rollout.sampling[sampling].n, rollout.seed, number, sampling)

    def _settings_to_keep(self) -> dict[str, Any]:
        return settings_to_keep(self.job, **asdict(self._data.content()), files=self._files)

    def _state(self, step: int) -> ControllerState:
        sampling = self._sampling
        return ControllerState(
            step=step,
            kl_controller=self._kl.state_dict(),
            kept_settings=self._settings_to_keep(),
            num_batches=sampling.num_batches,
            search=asdict(sampling.search),
            waiting=sampling.waiting,
        )

    def _summary(self) -> Summary:
        return Summary(
            run_dir=self.job.run_dir,
            step=self.status.step,
            # A run that only validates makes no steps.
            total_steps=self.status.step if self.job.trainer.val_only else self.status.total_steps,
            records=self.status.records,
            answers=self._answers,
            checkpoint=self._checkpoints.latest(),
            rollout_dumps=self.job.trainer.rollout_data_dir,
            validation_dumps=self.job.trainer.validation_data_dir,
        )
