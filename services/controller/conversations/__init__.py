"""Drives conversations: turns of the policy from the rollout, answers from the environment, rows for the page.

conversing.py  the rollout that a page sees: rows whose agent has an environment become conversations
conversation.py  one conversation, turn by turn
rows.py        the tensors of the rows of one request
turns.py       asks the rollout for the turns of many rows together
"""
