"""Search for the smallest set of operators and modules that must stay out of float16: `--force_fp32_ops auto`.

The pipeline first generates images in float32, with the kernels of the GPU or, without one, with the operators'
reference bodies on the CPU. The inputs of each component are recorded and its graph runs on them again: once with every
value observed that float16 would hold, to find values outside its range; then with values rounded to float16, to test
whether a set of exceptions is sufficient and whether each of them is necessary.
"""
