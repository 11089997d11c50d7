"""What an observer of the queue and the batches is called with."""

from __future__ import annotations

from sdonnx.serve.image_request import BatchKey

__all__ = ["ServeObserver"]


class ServeObserver:
    """Receives the events of a server; every method may be called by any thread, and does nothing here."""

    def queued(self, images: int) -> None:
        """Note the number of images that wait."""

    def batch_started(self, key: BatchKey, queue_s: list[float]) -> None:
        """Note a batch.

        Args:
            key: its key.
            queue_s: seconds that each of its images waited.
        """

    def stepped(self, key: BatchKey, images: int) -> None:
        """Note a call of the denoiser for a number of images."""

    def stage_ended(self, model: str, stage: str, seconds: float) -> None:
        """Note the time of a stage: "denoise" (text encoders and steps), "decode" or "encode_file"."""

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        """Note the end of a request.

        Args:
            model: name of the model.
            outcome: "completed", "cancelled", "refused" (its arguments), "expired" or "failed".
            seconds: time since it was accepted.
        """

    def loras_changed(self, model: str, seconds: float) -> None:
        """Note a change of a model's LoRAs, and the seconds that it took to read them and to compute the weights."""

    def captures_pending(self, shapes: int) -> None:
        """Note the number of shapes that are still to be captured in the background."""

    def captured(self, model: str, shapes: int, size_bytes: int, free_bytes: int | None) -> None:
        """Note the captured shapes of a model, their bytes, and the device's free memory; None on a CPU."""
