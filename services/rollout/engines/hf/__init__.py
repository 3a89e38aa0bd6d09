"""Engine `hf`: a transformers causal LM with a KV cache. For the CPU, and the reference for other engines.

engine.py is the engine. batch.py has the rows that are decoded together: they join and leave between two decode
steps. group.py has the rows of a batch that are at the same token, cached_attention.py one forward pass over
all. kv_store.py keeps keys and values of rows that another request may continue.

Law: the keys and values of a response token are computed by attention over exactly the columns up to its own,
whether the token was sampled here, sampled elsewhere or added by the request. The prompt's are computed by one
pass of width P. Therefore a row that is continued has the bits of one that was never cut, with kept keys and
values or without. Weights that are swapped in while a row is decoded are the exception: its keys and values are
computed again by one pass, and are not kept.

The bits of a row do not depend on other rows as long as no matrix has too few rows (`batch_invariant_rows`)
and every width depends only on the token. Therefore a token is repeated to fill up small batches, prompts keep
their full width, and attention at token t covers the same P + t + 1 columns for every row.
"""

from rolemesh.services.rollout.engines.hf.engine import HfEngine

__all__ = ["HfEngine"]
