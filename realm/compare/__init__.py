"""The systems that REALM's Table 1 compares, and kNN-LM, each in one file.

system       the interface of a compared system, and its folder
drqa, ...    one system per file: `Config`, `train`, `load`
"""
