"""The keys of jobs that talk to the agents of echo_agent.py, and a model that talks."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from rolemesh.models.tiny import make_tiny_model

PLUGIN = Path(__file__).with_name("echo_agent.py")
TOKENS = 48
TALKS = (
    "rollout.multi_turn.enable=true",
    "rollout.agent.default_agent_loop=echo",
    f"plugins=[{PLUGIN}]",
    "rollout.multi_turn.max_assistant_turns=3",
    f"data.max_response_length={TOKENS}",
)


def make_talkative(directory: Path) -> Path:
    """Make a model of random weights that ends its turns: one token in 16 is an end.

    With this seed, conversations of a test have one, two and three turns.
    """
    made = make_tiny_model(directory, "qwen2", num_layers=1, seed=7)
    model = AutoModelForCausalLM.from_pretrained(made)
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*range(0, 256, 16), own]
    model.generation_config.save_pretrained(made)
    return made
