"""Engine `vllm`: AsyncLLM with continuous batching, on CUDA and on a CPU. engine.py is the engine, arguments.py
what becomes of each key of the job file, extension.py what runs in vLLM's worker processes, region.py the
memory between those and us, owner.py what ties those to us.

Rows: the tokens of a row follow from its prompt, its seed, the weights and the sampling parameters. Its bits do
not: which rows share a forward changes the last ones (1e-6 of a log-probability in float32), and may at times
tip the draw of a token.

Weights: between two steps all rows pause, the new version is loaded, the KV cache is dropped. Rows that were
running compute theirs anew with the new weights, so every token has exactly the distribution of the version
that its `weight_versions` names, given all tokens before it.
"""
