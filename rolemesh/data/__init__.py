"""Data: from Parquet in verl's layout to batches of prompts, and from other files to that layout.

parquet.py reads and writes rows (column_process.py reads columns of unknown size), dataset.py tokenises them
into batches, order.py says which rows are step k's, gsm8k.py and arithmetic.py write data sets.
"""

from rolemesh.data.arithmetic import write_arithmetic
from rolemesh.data.dataset import PromptDataset
from rolemesh.data.gsm8k import write_gsm8k
from rolemesh.data.order import PromptOrder

__all__ = ["PromptDataset", "PromptOrder", "write_arithmetic", "write_gsm8k"]
