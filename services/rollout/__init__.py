"""Rollout: generates responses with the actor's current weights, and streams rows as they finish.

worker.py is the role in process, servicer.py translates from and to protobuf, engines/ has the engines.
"""
