"""The fused operators: contracts, reference bodies and kernel test cases, one operator a file.

To add an operator: write its file (`bias_add.py` is the shortest), add its contract to `operator_table.py`, write
`tests/operators/test_NAME.py` with an `OPERATOR_TEST`, and run `python scripts/write_kernel_cases.py`.
"""
