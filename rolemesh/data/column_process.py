"""Reads one column of a Parquet file in a process with bounded memory.

Texts in a delta encoding share prefixes, and Arrow cannot store a shared prefix once. So a page of kilobytes
may unpack to any size, and nothing reveals that size beforehand. A separate process unpacks the column and
sends it on, a few rows at a time. Outside Linux its memory is not limited; only the size of the rows it sends
is.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_AT_ONCE = 64
SPARE_BYTES = 64 << 20  # memory beyond the limit, for decompressing a page and for writing
MERGED_BYTES = 64 << 20  # merge batches into parts of about this size: a table of very many parts is slow
# exit codes of the reader
TOO_LARGE = 3
IO_ERROR = 4
AS = resource.RLIMIT_AS


class TooLarge(Exception):
    """The column unpacks to more bytes than allowed."""


def read_bounded(file: Path, column: str, max_bytes: int) -> pa.Table:
    """Read one column, as a table with only that column.

    Raises:
        TooLarge: it unpacks to more than max_bytes.
        pa.ArrowInvalid: it cannot be read.
        OSError: an I/O error.
    """
    command = [sys.executable, "-P", __file__, str(file), column, str(max_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        try:
            table = pa.concat_tables(_merged(reader.stdout))
        except (pa.ArrowInvalid, OSError):  # the reader ended before or during its stream
            table = None
        finally:
            reader.stdout.close()  # ends a reader that is still writing
            words = reader.stderr.read().decode(errors="replace").strip()
    if reader.returncode == TOO_LARGE:
        raise TooLarge
    if reader.returncode == IO_ERROR:
        raise OSError(errno.EIO, f"column {column!r} cannot be read: {words}", str(file))
    if reader.returncode or table is None:
        raise pa.ArrowInvalid(f"column {column!r}: {words or f'its reader exited with {reader.returncode}'}")
    return table


def _merged(stream: Any) -> Iterator[pa.Table]:
    with pa.ipc.open_stream(stream) as batches:
        yield batches.schema.empty_table()
        waiting: list[Any] = []
        num_bytes = 0
        for batch in batches:
            waiting.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > MERGED_BYTES:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting = []
                num_bytes = 0
        yield pa.Table.from_batches(waiting, batches.schema).combine_chunks()


def _send(file: str, column: str, max_bytes: int) -> None:
    pa.set_memory_pool(pa.system_memory_pool())  # the other pools reserve memory in advance
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + max_bytes + SPARE_BYTES
        _, hard = resource.getrlimit(AS)
        resource.setrlimit(AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    num_bytes = 0
    with pq.ParquetFile(file, pre_buffer=False) as opened:
        at = opened.schema_arrow.get_field_index(column)
        with pa.ipc.new_stream(sys.stdout.buffer, pa.schema([opened.schema_arrow.field(at)])) as stream:
            for batch in opened.iter_batches(ROWS_AT_ONCE, columns=[column], use_threads=False):
                num_bytes += batch.nbytes
                if num_bytes > max_bytes:
                    sys.exit(TOO_LARGE)
                stream.write_batch(batch)


if __name__ == "__main__":
    try:
        _send(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except MemoryError:
        sys.exit(TOO_LARGE)
    except (pa.ArrowException, OSError) as error:
        print(f"{error!s:.1000}", file=sys.stderr)
        sys.exit(IO_ERROR if getattr(error, "errno", None) else 1)
