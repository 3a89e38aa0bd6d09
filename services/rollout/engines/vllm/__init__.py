"""Engine `vllm`: AsyncLLM with continuous batching, on CUDA and on a CPU.

engine.py is the engine. engine_args.py maps each key of the job file. extension.py runs in vLLM's worker
processes, and maps the memory of a version there. owner.py ends these processes with this one.

Rows: the tokens of a row depend on its prompt, its seed, the weights and the sampling parameters. Its last bits
also depend on which rows share a forward pass (1e-6 of a log-probability in float32). This may sometimes change
a sampled token.

Weights: between two steps all rows pause, the new version is loaded, and the KV cache is dropped. Running rows
compute their keys and values again with the new weights. So every token has exactly the distribution of the
version that its `weight_versions` names, given all tokens before it.
"""
