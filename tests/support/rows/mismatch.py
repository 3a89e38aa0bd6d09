"""Two responses whose probabilities by the engine and by the trainer are known."""

from __future__ import annotations

import math

from torch import tensor

MASK = tensor([[True, True, True], [True, False, False]])
# old over rollout probability: 1/2, 3, 4 and 1/5; what stands on padding must not matter
RATIOS = tensor([[0.5, 3.0, 4.0], [0.2, 7.0, math.inf]])
OLD = tensor([[0.1, 0.6, 0.8], [0.1, 1.0, 1.0]]).log()
ROLLOUT = OLD - RATIOS.log()
