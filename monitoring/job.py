"""The dashboard *job*: does the policy learn, how fast, and how much could a failure lose."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    Panel,
    Query,
    board,
    lines,
    number,
    run,
    stacked,
    step,
    timeline,
)

DESCRIPTION = "Does the policy learn, how fast, and how much could a failure lose."
ENDED, STEPS = run("rolemesh_step_ended_timestamp_seconds"), run("rolemesh_step_seconds_count")
STEP_S = "max({})".format(run("rolemesh_step_metric", 'name="timing_s/step"'))
SINCE_S = f"time() - max({ENDED} > 0)"
AGO = "min_over_time(({}{})[30m:30s])"
# Seconds from the end of one step to that of the next. If no step has ended for half an hour, those of the last
# step, or those that have passed since.
PACE = (
    f"(max(({ENDED} - {AGO.format(ENDED, ' > 0')}) / ({STEPS} - {AGO.format(STEPS, '')} > 0)) "
    f"or {SINCE_S} > {STEP_S} or {STEP_S})"
)


def job() -> Dashboard:
    """Build the dashboard *job*."""
    rows = {"Now": _now(), "Learning": _learning(), "Speed": _speed(), "Staleness": _stale()}
    return board("job", DESCRIPTION, rows, roles=False)


def _now() -> list[Panel]:
    """Panels on the run's current state."""
    made = f"max({run('rolemesh_training_step')})"
    planned = f"max({run('rolemesh_training_steps_planned')})"
    return [
        number(
            "State",
            "Current state of the run.",
            Query(f"max by (state) ({run('rolemesh_run_state')}) == 1", "{{state}}"),
            names=True,
        ),
        number("Step", "Number of completed steps.", Query(made)),
        number("Steps planned", "Total number of steps of the job.", Query(planned)),
        number("Left", "Time at the last half hour's pace.", Query(f"({planned} - {made}) * {PACE}"), "s"),
        number("Last reward", "Mean score of the last step's responses.", step("critic/score/mean", "")),
        number(
            "Last accuracy",
            "Accuracy of the last validation, mean over data sources.",
            Query("avg({})".format(run("rolemesh_step_metric", "name=~'val-core/.+/mean@.+'"))),
            "percentunit",
        ),
        number(
            "Since the last step",
            "Time since the last step, or a pause after it, ended.",
            Query(SINCE_S),
            "s",
        ),
        number(
            "Checkpoint's age",
            "Time since the last checkpoint. If the actor fails now, the training since then is lost.",
            Query(f"time() - max({run('rolemesh_checkpoint_timestamp_seconds')} > 0)"),
            "s",
        ),
    ]


def _learning() -> list[Panel]:
    """Panels that show whether the policy learns."""
    return [
        lines(
            "Reward",
            "Scores of a step's responses, and their mean minus the KL penalty.",
            step("critic/score/mean", "mean"),
            step("critic/score/max", "best"),
            step("critic/score/min", "worst"),
            step("critic/rewards/mean", "mean less KL"),
        ),
        lines(
            "Validation accuracy",
            "Accuracy on held-out prompts in the last validation, by data source (trainer.test_freq).",
            Query("max by (name) ({})".format(run("rolemesh_step_metric", "name=~'val-core/.+'")), "{{name}}"),
            unit="percentunit",
        ),
        lines(
            "KL, nats per token",
            "Distance of the policy from the reference (in the reward's or the loss's KL term), and of an "
            "update. To the reference it should stay well under 1; of an update under 0.1.",
            step("actor/reward_kl_penalty", "to the reference"),
            step("actor/kl_per_token", "to the reference, in the loss"),
            step("actor/ppo_kl", "of the update"),
        ),
        lines(
            "Entropy, nats",
            "Entropy of the policy, aggregated by actor.loss_agg_mode. A fall to 0 is a collapse: all "
            "responses are alike.",
            step("actor/entropy", "entropy"),
        ),
        lines(
            "Lengths, tokens",
            "Lengths of a step's responses and prompts. If they grow with the reward, it may reward length.",
            step("response_length/mean", "response, mean"),
            step("response_length/max", "response, longest"),
            step("prompt_length/mean", "prompt, mean"),
            least=0,
        ),
        lines(
            "Shares",
            "Share of responses cut off at data.max_response_length, and of tokens whose ratio or value was "
            "clipped.",
            step("response_length/clip_ratio", "responses cut off"),
            step("actor/pg_clipfrac", "tokens clipped"),
            step("critic/vf_clipfrac", "values clipped"),
            unit="percentunit",
        ),
        lines(
            "Losses",
            "Losses of policy and values. A job without a critic has only the policy's.",
            step("actor/pg_loss", "policy"),
            step("critic/vf_loss", "value"),
        ),
        lines(
            "Gradient norms",
            "Norms before clipping. A step whose norm is not finite is skipped, and ends the run.",
            step("actor/grad_norm", "actor"),
            step("critic/grad_norm", "critic"),
            Query(
                f"sum by (role) ({run('rolemesh_nonfinite_gradients_total')})", "{{role}}, not finite (count)"
            ),
        ),
        lines(
            "Values",
            "The critic's predictions, and the actual returns. A job without a critic has only the returns.",
            step("critic/values/mean", "values"),
            step("critic/returns/mean", "returns"),
        ),
    ]


def _speed() -> list[Panel]:
    """Panels on throughput and step time."""
    phases = run("rolemesh_step_metric", "name=~'timing_s/.+',name!='timing_s/step'")
    return [
        lines(
            "Throughput, tokens per second",
            "Prompt and response tokens of a step, divided by its duration, and on GPUs by their number.",
            step("perf/throughput", "tokens/s"),
            least=0,
        ),
        stacked(
            "Seconds of a step, by phase",
            "Phases overlap: chunks are scored while others are generated. So the sum may exceed the step.",
            Query(
                f"max by (phase) (label_replace({phases}, 'phase', '$1', 'name', 'timing_s/(.+)'))", "{{phase}}"
            ),
            unit="s",
        ),
        lines(
            "Steps per hour",
            "By the clock in the last half hour, with validations and pauses. "
            "After so long without any, it falls.",
            Query(f"3600 / {PACE}", "steps/h"),
            least=0,
        ),
        timeline(
            "What runs now",
            "Phases of the current step.",
            Query(f"max by (phase) ({run('rolemesh_phase_running')})", "{{phase}}"),
        ),
        lines(
            "Time since",
            "Time since the last step, or a pause after it, ended, and since the last checkpoint was written.",
            Query(SINCE_S, "step"),
            Query(f"time() - max({run('rolemesh_checkpoint_timestamp_seconds')} > 0)", "checkpoint"),
            unit="s",
            width=12,
            least=0,
        ),
        lines(
            "MFU of the updates",
            "Operations of an update in a second, as a share of the GPUs' peak rate. Empty on a CPU.",
            step("perf/mfu/actor", "actor"),
            step("perf/mfu/critic", "critic"),
            unit="percentunit",
            width=12,
            least=0,
        ),
        lines(
            "Peak GPU memory",
            "The most that tensors took in a process since it began, and that torch held. Empty on a CPU.",
            _gibibytes("perf/max_memory_allocated_gb", "actor, tensors"),
            _gibibytes("perf/max_memory_reserved_gb", "actor, held"),
            _gibibytes("perf/max_memory_allocated_gb/critic", "critic, tensors"),
            _gibibytes("perf/max_memory_reserved_gb/critic", "critic, held"),
            unit="bytes",
            width=12,
            least=0,
        ),
    ]


def _gibibytes(name: str, legend: str) -> Query:
    """Query a metric of the last step that is in GiB, in bytes."""
    return Query(f"2^30 * {step(name, legend).expr}", legend)


def _stale() -> list[Panel]:
    """Panels on the age of the weights that generated a step's tokens."""
    return [
        lines(
            "Staleness, steps",
            "Age, in steps, of the weights that generated a step's tokens; 0 unless rollout.mode is async.",
            step("rollout/staleness/mean", "mean"),
            step("rollout/staleness/max", "most"),
            width=12,
            least=0,
        ),
        lines(
            "Stale tokens, mixed rows",
            "Tokens generated by older weights, and rows generated by more than one version.",
            step("rollout/stale_tokens", "stale tokens"),
            step("rollout/mixed_rows", "mixed rows"),
            width=12,
            least=0,
        ),
    ]
