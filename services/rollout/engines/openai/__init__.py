"""Engine `openai`: servers that somebody else runs generate, vLLM's or SGLang's own. servers.py is what is
said to them over HTTP, engine.py spreads rows over them and keeps them on one version of the weights,
folder.py is where they find the weights. docs/openai-engine.md says how to start a server.

Weights: a server is asked for no more rows, those that it is making are broken off and come back as far as
they got, and it loads the version from a directory. Rows that were broken off go on from there, at any
server: what one request answers was made by one version, and that is what `weight_versions` says. Keys and
values are computed anew, so a token has exactly the distribution of its version, given all tokens before it.

A row's tokens follow from its prompt, its seed, the weights and the sampling parameters as far as they do in
the server: which rows share a forward changes last bits, and may at times tip a draw.
"""
