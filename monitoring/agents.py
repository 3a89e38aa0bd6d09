"""The dashboard *agents*: what happens in conversations, what tools cost, and why conversations end."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import Panel, Query, board, lines, quantile, rate, run, stacked, step

DESCRIPTION = "What happens in conversations, what tools cost, and why conversations end."
TURN_REWARDS = "conversation/reward/turn_(.+)/mean"
ENDS = "conversation/ended/(.+)"


def agents() -> Dashboard:
    """Build the dashboard *agents*."""
    rows = {"Conversations": _conversations(), "Tools": _tools(), "Environments": _environments()}
    return board("agents", DESCRIPTION, rows, roles=False)


def _by(pattern: str) -> str:
    """Select metrics of the last step by the first group of their name, as label `part`."""
    selected = run("rolemesh_step_metric", f"name=~'{pattern}'")
    return f"max by (part) (label_replace({selected}, 'part', '$1', 'name', '{pattern}'))"


def _conversations() -> list[Panel]:
    """Panels on the conversations of a step."""
    return [
        lines(
            "Turns",
            "Turns of the policy in a conversation, mean over the step's rows.",
            step("conversation/turns/mean", "turns"),
            least=0,
        ),
        lines(
            "Rewards of turns",
            "Mean reward of the environment for the first, second, … turn. The last has the conversation's.",
            Query(_by(TURN_REWARDS), "turn {{part}}"),
        ),
        stacked(
            "Why conversations end",
            "Share of the step's conversations by why they ended: the environment's reason, or the limit.",
            Query(_by(ENDS), "{{part}}"),
            unit="percentunit",
        ),
        lines(
            "Tokens",
            "Tokens of a row's conversation: sampled by the policy, and with what the environment added.",
            step("response_length/mean", "sampled"),
            step("conversation/tokens/mean", "all"),
            width=12,
            least=0,
        ),
        lines(
            "Wait for the environment",
            "Seconds that a conversation waited for its environment, mean over the step's rows.",
            step("timing_s/environment", "environment"),
            unit="s",
            width=12,
            least=0,
        ),
    ]


def _tools() -> list[Panel]:
    """Panels on tools."""
    calls = rate(run("rolemesh_tool_calls_total"), "tool")
    return [
        lines("Calls of tools", "Calls by tool.", Query(calls, "{{tool}}"), unit="reqps", least=0),
        lines(
            "Failed calls of tools",
            "Share of a tool's calls that failed or were refused.",
            Query(f"{rate(run('rolemesh_tool_errors_total'), 'tool')} / ({calls} > 0)", "{{tool}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Seconds of a tool's call",
            "Duration of a call, by tool: half and 95 of 100 are quicker.",
            Query(quantile(0.5, run("rolemesh_tool_seconds_bucket"), "tool"), "{{tool}} 50"),
            Query(quantile(0.95, run("rolemesh_tool_seconds_bucket"), "tool"), "{{tool}} 95"),
            unit="s",
            least=0,
        ),
    ]


def _environments() -> list[Panel]:
    """Panels on the replicas of the role environment."""
    return [
        lines(
            "Open episodes",
            "Episodes that a replica keeps.",
            Query(f"max by (pod) ({run('rolemesh_environment_episodes')} > 0)", "{{pod}}"),
            least=0,
        ),
        lines(
            "Ends of episodes",
            "Episodes that ended, by reason: closed is the ordinary one.",
            Query(rate(run("rolemesh_environment_ended_total"), "agent", "reason"), "{{agent}} {{reason}}"),
            unit="reqps",
            least=0,
        ),
        lines(
            "Lost",
            "Episodes that began anew because their replica was gone, and threads of tools that nobody awaits.",
            Query(f"sum({run('rolemesh_episodes_lost_total')})", "episodes"),
            Query(f"sum({run('rolemesh_tool_threads_left')})", "threads"),
            least=0,
        ),
    ]
