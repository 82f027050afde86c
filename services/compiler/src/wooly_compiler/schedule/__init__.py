"""Makes a kernel of a group's graph: chooses the loops, what each loop computes, and what is stored between loops.

Without folds, points are elements. With folds, there are two layouts. If the folded dimension is contiguous in memory, a point is
a row and its lanes go along the folded dimension. If neighbouring rows are contiguous, a point is a block of columns, its lanes
are the columns, and the fold is a sequential loop. Both layouts have the same accumulators and combine them in the same order.

`nest` chooses the loops; `values` writes what the innermost loop computes; `points`, `rows`, `columns` and `sums` write the
outer loops; `kernel` selects among these.
"""
