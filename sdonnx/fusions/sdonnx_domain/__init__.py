"""The rules that write our own operators, of the domain `sdonnx`: one file for each file of contracts.

`use_kernels.RULES` has the rules of each operator; docs/explanation/kernels.md has them in a table.
"""
