"""The value model: what return to expect before each token.

worker.py computes (DataProto in, DataProto out), servicer.py translates.
"""
