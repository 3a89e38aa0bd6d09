"""The policy under training, and the reference policy, which is the same without an optimizer.

worker.py computes (DataProto in, DataProto out), servicer.py translates.
"""
