"""The k largest scores of every row, as the indexer's selection of compressed keys.

Row r has lengths[r] valid scores, the first of them in column 0. It gets the columns of its k largest, in ascending
order; of equal scores at the boundary the lower columns are taken, so the result is unique and repeats bit by bit. A
row with lengths[r] ≤ k gets 0 … lengths[r] − 1 and then −1, without a look at its scores.

Inputs: logits float32 [R, ·] (rows may be apart), lengths int32 of R values in any shape.
Output: int32 [R, k], a view of the plan's buffer or `out` (int32 [R, ·], whose rows may be apart).

Edges: R = 0 launches nothing; columns beyond the length are not read; −∞ is a score like any other; −0 is less than +0;
NaN is greater than everything if its sign is clear and less if it is set. Any k up to 4096 and any width.

A program keeps a chunk of the row in registers and finds the k-th largest key bit by bit. Rows of more than one chunk
leave k candidates per chunk, from which the next launch chooses in the same way.

Up to 8 rows of more than 16384 scores, with k up to 1024, go another way, in three launches. 128 programs a row look at
interleaved parts of it; each finds a bound below its ⌈k/64⌉-th largest. At least k scores reach the 64th largest of the
bounds, about 2k where the best scores are spread over the row or lie together. 128 programs collect these, and one
chooses among them. Where far more reach the bound, as with equal scores, that program works on them tile by tile.
The grid depends only on the widths that the plan was made for.
Tolerance: bitwise. Source: vLLM's `top_k_per_row_prefill` and `top_k_per_row_decode` for the results.
"""
