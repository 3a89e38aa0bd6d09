"""The dashboard *job*: does it learn, how quickly, and what could be lost."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    WINDOW,
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

DESCRIPTION = "Does it learn, how quickly, and what could be lost."


def job() -> Dashboard:
    """The dashboard *job*."""
    rows = {"Now": _now(), "Learning": _learning(), "Speed": _speed(), "Staleness": _stale()}
    return board("job", DESCRIPTION, rows, roles=False)


def _now() -> list[Panel]:
    """What the run is doing, at a glance."""
    made = f"max({run('rolemesh_training_step')})"
    planned = f"max({run('rolemesh_training_steps_planned')})"
    pace = f"rate({run('rolemesh_step_seconds_sum')}[30m]) / rate({run('rolemesh_step_seconds_count')}[30m])"
    return [
        number(
            "State",
            "What the run is doing.",
            Query(f"max by (state) ({run('rolemesh_run_state')}) == 1", "{{state}}"),
            names=True,
        ),
        number("Step", "Steps that have ended.", Query(made)),
        number("Steps planned", "Of the whole job.", Query(planned)),
        number("Left", "At the pace of the last half hour.", Query(f"({planned} - {made}) * max({pace})"), "s"),
        number("Last reward", "Mean score of the last step's responses.", step("critic/score/mean", "")),
        number(
            "Last accuracy",
            "Of the last validation, mean over the data sources.",
            Query("avg({})".format(run("rolemesh_step_metric", "name=~'val-core/.+/mean@.+'"))),
            "percentunit",
        ),
        number(
            "Since the last step",
            "Seconds since a step ended.",
            Query(f"time() - max({run('rolemesh_step_ended_timestamp_seconds')} > 0)"),
            "s",
        ),
        number(
            "Checkpoint's age",
            "What was learnt in this time would be lost with the actor.",
            Query(f"time() - max({run('rolemesh_checkpoint_timestamp_seconds')} > 0)"),
            "s",
        ),
    ]


def _learning() -> list[Panel]:
    """Whether it learns."""
    return [
        lines(
            "Reward",
            "Scores of a step's responses, as the reward gives them, and their mean less the KL penalty.",
            step("critic/score/mean", "mean"),
            step("critic/score/max", "best"),
            step("critic/score/min", "worst"),
            step("critic/rewards/mean", "mean less KL"),
        ),
        lines(
            "Validation accuracy",
            "Held-out prompts, by data source, as of the last validation (trainer.test_freq).",
            Query("max by (name) ({})".format(run("rolemesh_step_metric", "name=~'val-core/.+'")), "{{name}}"),
            unit="percentunit",
        ),
        lines(
            "KL, nats per token",
            "How far the policy is from the reference, as the reward or the loss weighs it, and how far an "
            "update moves it. It should stay well under 1; of an update under 0.1.",
            step("actor/reward_kl_penalty", "to the reference"),
            step("actor/kl_loss", "to the reference, in the loss"),
            step("actor/ppo_kl", "of the update"),
        ),
        lines(
            "Entropy, nats",
            "How undecided the policy is, aggregated by actor.loss_agg_mode. A fall to 0 is a collapse: all "
            "responses are alike.",
            step("actor/entropy", "entropy"),
        ),
        lines(
            "Lengths, tokens",
            "Responses and prompts of a step. Lengths that grow with the reward may be what it rewards.",
            step("response_length/mean", "response, mean"),
            step("response_length/max", "response, longest"),
            step("prompt_length/mean", "prompt, mean"),
            least=0,
        ),
        lines(
            "Shares",
            "Responses cut off at data.max_response_length, and tokens whose ratio was clipped.",
            step("response_length/clip_ratio", "responses cut off"),
            step("actor/pg_clipfrac", "tokens clipped"),
            step("critic/vf_clipfrac", "values clipped"),
            unit="percentunit",
        ),
        lines(
            "Losses",
            "Of policy and values; a job without a critic has the first alone.",
            step("actor/pg_loss", "policy"),
            step("critic/vf_loss", "value"),
        ),
        lines(
            "Gradient norms",
            "Before clipping. A step whose norm is not finite is not taken, and ends the run.",
            step("actor/grad_norm", "actor"),
            step("critic/grad_norm", "critic"),
            Query(
                f"sum by (role) ({run('rolemesh_nonfinite_gradients_total')})", "{{role}}, not finite (count)"
            ),
        ),
        lines(
            "Values",
            "What the critic expects, and what came; a job without a critic has the second alone.",
            step("critic/values/mean", "values"),
            step("critic/returns/mean", "returns"),
        ),
    ]


def _speed() -> list[Panel]:
    """How quickly."""
    phases = run("rolemesh_step_metric", "name=~'timing_s/.+',name!='timing_s/step'")
    return [
        lines(
            "Throughput, tokens per second",
            "Prompt and response tokens of a step over its seconds.",
            step("perf/throughput", "tokens/s"),
            least=0,
        ),
        stacked(
            "Seconds of a step, by phase",
            "Phases overlap: chunks are judged while others are generated, so the sum may exceed the step.",
            Query(
                f"max by (phase) (label_replace({phases}, 'phase', '$1', 'name', 'timing_s/(.+)'))", "{{phase}}"
            ),
            unit="s",
        ),
        lines(
            "Steps per hour",
            "Of the last minutes.",
            Query(f"3600 * sum(rate({run('rolemesh_step_seconds_count')}{WINDOW}))", "steps/h"),
            least=0,
        ),
        timeline(
            "What runs now",
            "The phases of the running step.",
            Query(f"max by (phase) ({run('rolemesh_phase_running')})", "{{phase}}"),
        ),
        lines(
            "Time since",
            "A step ended, a checkpoint was written.",
            Query(f"time() - max({run('rolemesh_step_ended_timestamp_seconds')} > 0)", "step"),
            Query(f"time() - max({run('rolemesh_checkpoint_timestamp_seconds')} > 0)", "checkpoint"),
            unit="s",
            width=12,
            least=0,
        ),
    ]


def _stale() -> list[Panel]:
    """How far behind the weights were."""
    return [
        lines(
            "Staleness, steps",
            "How far behind the weights were that made a step's tokens; 0 unless rollout.mode is async.",
            step("rollout/staleness/mean", "mean"),
            step("rollout/staleness/max", "most"),
            width=12,
            least=0,
        ),
        lines(
            "Stale tokens, mixed rows",
            "Tokens that older weights made; rows that more than one version made.",
            step("rollout/stale_tokens", "stale tokens"),
            step("rollout/mixed_rows", "mixed rows"),
            width=12,
            least=0,
        ),
    ]
