"""Drives conversations: turns of the policy from the rollout, answers from the environment, rows for the page.

conversation_rollout.py  the rollout that a page sees: rows whose agent has an environment become conversations
conversation.py          one conversation, turn by turn
row_columns.py           the tensors of the rows of one request
turn_batches.py          asks the rollout for the turns of many rows together
"""
