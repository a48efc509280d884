"""Drafting: sparse decoding steps draft tokens, and one dense pass of the same model says which of them hold.

The answer is the one of dense attention. What it gains is time: where a sparse step is much faster than a dense one, a
few of them and one dense pass take less than the dense steps in whose place they stand (self-speculative decoding).
"""
