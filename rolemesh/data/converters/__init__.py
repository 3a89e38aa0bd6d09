"""Converts the files of data sets' publishers into rows for training."""
