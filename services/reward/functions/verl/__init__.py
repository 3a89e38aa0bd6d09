"""The rules of verl 0.9.1, to the letter (`reward.rules: verl`), for runs that are compared with verl's.

Each gives the results of a file in verl/utils/reward_score (Apache-2.0), faults included, in time that is
linear in the response. tests/reward/test_verl_rules.py has results of verl 0.9.1.
"""
