"""The actor (the policy under training), and the reference, a policy without an optimizer.

worker.py computes (DataProto in, DataProto out), servicer.py translates from and to protobuf, objective.py is
the loss.
"""
