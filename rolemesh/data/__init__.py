"""Reads rows in verl's layout as batches of prompts, and converts other data to that layout.

row_source.py loads the rows of data.dataset, and files.py those of several files: parquet.py reads and writes
Parquet (column_process.py reads columns of unknown size), json_lines.py reads JSON Lines. dataset.py tokenises
rows into batches, supervised.py rows with responses, pairs.py pairs of them. order.py picks each batch's rows.
converters/ writes data sets that others publish.
"""

from rolemesh.data.converters.gsm8k_dataset import write_gsm8k
from rolemesh.data.dataset import PromptDataset
from rolemesh.data.order import PromptOrder

__all__ = ["PromptDataset", "PromptOrder", "write_gsm8k"]
