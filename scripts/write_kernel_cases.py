"""Write the doctor's files of kernel cases from the contracts: `python scripts/write_kernel_cases.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.doctor.check_kernels import KERNEL_CASES_FILE, OWN_KERNEL_CASES_FILE
from sdonnx.fusions.derived_tables import flags_by_operator
from sdonnx.operators.kernel_case_graphs import kernel_case_file
from sdonnx.operators.operator_table import OUR_KERNEL_CASES

if __name__ == "__main__":
    KERNEL_CASES_FILE.write_text(kernel_case_file(flags_by_operator()), encoding="utf-8")
    OWN_KERNEL_CASES_FILE.write_text(kernel_case_file({}, OUR_KERNEL_CASES), encoding="utf-8")
