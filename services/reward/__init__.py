"""The reward role: scores responses.

worker.py scores a batch. functions/ has the rules, selected by a row's data_source, and loads a user's
function. Scoring runs in processes of its own (scoring_pool.py, scoring_process.py), or by a model
(model_scorer.py).
"""
