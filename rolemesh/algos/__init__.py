"""The algorithms as formulas: tensors in, tensors out, no I/O and no model.

aggregation.py reduces per-token losses to one number. advantages.py, group_advantages.py, policy_loss.py,
covariance.py, value_loss.py, kl.py and rollout_correction.py hold one function for each formula. A new
advantage or loss is a new function here. It also needs a new page in services/controller/ if the steps
themselves differ.

Axes: B rows, T response tokens. Every mask is response_mask: True on the tokens that the policy sampled.
"""
