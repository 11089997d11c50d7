"""Proof that an optimized folder draws what the pipeline draws that it was made from."""

from __future__ import annotations

from sdonnx.verify.judgement import Thresholds
from sdonnx.verify.verifier import Request, Verification, verify_folder

__all__ = ["Request", "Thresholds", "Verification", "verify_folder"]
