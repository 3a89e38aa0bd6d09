"""The algorithms as formulas: tensors in, tensors out, no I/O and no model.

aggregation.py reduces per-token losses to one number. advantages.py, group_advantages.py, policy_loss.py,
preference.py, covariance.py, value_loss.py, kl.py and rollout_correction.py hold one function for each formula.
learning_rate.py has the schedules, repeated.py the metrics of several answers to a prompt, and resampling.py
the draw of PF-PPO.

A new advantage or loss is a function here and a declaration in rolemesh/catalog/. A method with another order
of calls is also a page in services/controller/pages/.

Axes: B rows, T response tokens. Every mask is response_mask: True on the tokens that the policy sampled.
"""
