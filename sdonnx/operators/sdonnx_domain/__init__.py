"""The contracts of our own operators, of the domain `sdonnx`, one family a file; their kernels are in `kernels/src`.

`sdonnx/fusions/sdonnx_domain` has their rewrite rules, and docs/explanation/kernels.md a table of all.
"""
