"""The key blocks of rows of blocks, as a table of a mask."""

from __future__ import annotations

import numpy

from longspan import _longspan
from longspan._mask_axis import Tables

#: Ranges of blocks per row that are compared one by one. Rows with more are bit words.
MAX_RANGES = 8
#: Elements of lists of blocks that are converted at a time.
_CHUNK = 1 << 22


class BlockRows:
    """Key blocks per row as ranges, or as bit words where rows have many ranges."""

    def __init__(
        self, text: str, rows: tuple[int, int], columns: tuple[int, int], tables: Tables
    ) -> None:
        (first_row, end_row), (first, end) = rows, columns
        layout = _longspan.Pattern(text).compile(
            (end_row - first_row) * 16,
            (end - first) * 16,
            block=16,
            query_offset=first_row * 16,
            key_offset=first * 16,
        )
        _, _, counts, indices, *_ = layout._block_lists("longest")
        counts, indices = counts[0, 0], indices[0, 0]
        step = max(_CHUNK // max(indices.shape[1], 1), 1)
        chunks = [slice(i, i + step) for i in range(0, len(counts), step)]
        ranges = [_ranges(counts[chunk], indices[chunk]) for chunk in chunks]
        most = max((edges.shape[1] for edges in ranges), default=0)
        #: Ranges per row, a power of two so that few numbers of them occur; 0: bit words.
        self.ranges = 1 << max(most - 1, 0).bit_length()
        self.words = 0
        if most <= MAX_RANGES:
            table = numpy.zeros((len(counts), self.ranges, 2), dtype="int64")
            for chunk, edges in zip(chunks, ranges, strict=True):
                table[chunk, : edges.shape[1]] = edges
            self.offset = tables.add(table)
            return
        self.ranges, self.words = 0, -(-(end - first) // 32)
        if len(counts) * self.words >= 1 << 31:
            raise ValueError(
                f"{len(counts)} rows of {end - first} blocks, expected a table of at most 2^36 of them: "
                f"use larger blocks, or at most {MAX_RANGES} ranges per row in place of {most}"
            )
        bits = numpy.zeros((len(counts), self.words * 4), dtype="uint8")
        for row, count in enumerate(counts):
            flags = numpy.zeros(self.words * 32, dtype=bool)
            flags[indices[row, :count]] = True
            bits[row] = numpy.packbits(flags, bitorder="little")
        self.offset = tables.add(bits.view("<u4"))


def _ranges(counts: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
    """First and end of the ranges of ascending indices: rows × ranges × 2, zeros behind them."""
    counted = numpy.arange(indices.shape[1]) < counts[:, None]
    joins = counted[:, 1:] & (numpy.diff(indices, axis=1) == 1)
    starts, ends = counted.copy(), counted.copy()
    starts[:, 1:] &= ~joins
    ends[:, :-1] &= ~joins
    number = numpy.cumsum(starts, axis=1) - 1
    edges = numpy.zeros((len(counts), int(starts.sum(axis=1).max(initial=0)), 2), dtype="int64")
    row, column = numpy.nonzero(starts)
    edges[row, number[row, column], 0] = indices[row, column]
    row, column = numpy.nonzero(ends)
    edges[row, number[row, column], 1] = indices[row, column] + 1
    return edges
