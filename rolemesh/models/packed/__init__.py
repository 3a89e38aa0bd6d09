"""Forward passes without padding: rows are laid end to end, and each token attends only to its own row.

Rows with a common prefix (the prompt of a group's answers, a chat template) share it: its tokens are computed
once, because a token's numbers depend only on the tokens before it.

`layout` says which tokens a pass computes and where they lie, `attention` computes attention over them, and
`probe` tries both on a model when a role loads it.
"""
