"""The fused operators: contracts, reference bodies and kernel test cases, one family a file.

ONNX Runtime's operators are in the `contrib_` files, our own in `sdonnx_domain`. To add one: write its contract in the
file of its family, add it to `operator_table.py`, write `tests/operators/test_NAME.py` with an `OPERATOR_TEST`, and run
`python scripts/write_kernel_cases.py`.
"""
