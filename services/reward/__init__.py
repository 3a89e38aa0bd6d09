"""The reward role: what a response is worth.

worker.py scores a batch; functions/ holds the rules, picked by a row's data_source, and the loading of a
function of the user's.
"""
