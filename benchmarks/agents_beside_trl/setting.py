"""What a phase of conversations is, for every contestant. Only the standard library: TRL's side has no more."""

# TRL's groups have at least two rows
PROMPTS = 32
GROUP = 2
CONVERSATIONS = PROMPTS * GROUP
MAX_CALLS = 8  # turns with a call, one in each, whose answers a conversation may get
# room; the latter for all turns with their tools' answers
PROMPT_TOKENS = 48
RESPONSE_TOKENS = 1536
TURN_TOKENS = 32  # mean of what a turn says before it calls or ends
CALLS = 0.75  # how often a turn calls
TOOL = "lookup"
ANSWER = "nothing"  # of the tool
WAITS = {"tools of 0 ms": 0.0, "tools of 0 to 200 ms": 0.2}  # the longest wait of a call
