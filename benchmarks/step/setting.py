"""What a step is, for every contestant. Only the standard library: TRL's environments import this too."""

PROMPT_TOKENS = 24
RESPONSE_TOKENS = 32
SEQUENCES = 256
GROUP = {"grpo": 4, "ppo": 1}  # answers to a prompt
MICRO_BATCH = 64  # rows of a forward pass with padding
LEARNING_RATE = 1e-6
CRITIC_LEARNING_RATE = 1e-5
KL_COEF = 0.05
FILLS = {"full": 0.0, "uneven": 0.4}  # end_probability's: full-length answers, and 40 % of their room
