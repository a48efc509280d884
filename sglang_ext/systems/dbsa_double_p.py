"""Double-P over DBSA's blocks: answers over pools read the blocks through their clusters, too."""

from dataclasses import replace

from sglang_ext.systems import double_p

NAME = "dbsa+double_p"
SYSTEM = replace(
    double_p.SYSTEM,
    summary="As double_p, and answers over pools read their blocks through clusters, too.",
    policy="sglang_ext.attention.double_p:DbsaDoublePPolicy",
    pages=False,
    mixed=False,  # it is for pools
    hybrid=False,  # likewise
)
