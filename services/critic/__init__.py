"""The critic, a value model: it predicts the return before each token.

worker.py computes (DataProto in, DataProto out), servicer.py translates from and to protobuf.
"""
