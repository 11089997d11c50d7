"""Verify that an optimized folder generates the same images as the pipeline that it was made from."""

from __future__ import annotations

from sdonnx.verify.findings import Thresholds
from sdonnx.verify.verification import Verification, VerificationRequest
from sdonnx.verify.verifier import verify_folder

__all__ = ["Thresholds", "Verification", "VerificationRequest", "verify_folder"]
