"""Engine `openai`: generates on external servers of vLLM or SGLang, which the user runs.

http_servers.py has the HTTP calls. engine.py spreads rows over the servers and keeps them on one version of the
weights. folder.py writes the directory from which servers load weights. docs/openai-engine.md says how to start
a server.

Weights: for an update, a server gets no new rows, its running rows are aborted and return the tokens made so
far, and it loads the version from a directory. Aborted rows then continue on any server. So one version makes
all tokens of a request's answer, and `weight_versions` names it. Keys and values are computed again, so a token
has exactly the distribution of its version, given all tokens before it.

A row's tokens depend on its prompt, its seed, the weights and the sampling parameters, as far as the server
guarantees it. Which rows share a forward pass changes last bits, and may sometimes change a sampled token.
"""
