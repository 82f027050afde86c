"""From a group's graph to a kernel: which dimensions are loops, what is computed in which of them, what is kept between them.

Without folds, points are elements. With folds, a point is a row and its lanes go along what is folded; where the tensors lie the
other way round, so that rows are neighbours in memory, a point is a block of columns, its lanes are the columns, and what is
folded is a sequential loop. Both have the same accumulators and combine them in the same order.

`nest` decides on the loops; `values` writes what is computed in the innermost; `points`, `rows`, `columns` and `sums` write the
loops around it; `kernel` chooses.
"""
