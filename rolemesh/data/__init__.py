"""Reads rows in verl's layout as batches of prompts, and converts other data to that layout.

source.py loads the rows of data.dataset, and files.py those of several files: parquet.py reads and writes
Parquet (column_process.py reads columns of unknown size), json_lines.py reads JSON Lines. dataset.py tokenises
rows into batches, supervised.py rows with responses, pairs.py pairs of them. order.py picks each batch's rows.
arithmetic.py and publishers/ write data sets.
"""

from rolemesh.data.arithmetic import write_arithmetic
from rolemesh.data.dataset import PromptDataset
from rolemesh.data.order import PromptOrder
from rolemesh.data.publishers.gsm8k import write_gsm8k

__all__ = ["PromptDataset", "PromptOrder", "write_arithmetic", "write_gsm8k"]
