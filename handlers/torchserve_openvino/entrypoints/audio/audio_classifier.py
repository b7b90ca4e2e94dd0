"""Classifies recordings: a WAV or FLAC file in, labels with scores out."""

from torchserve_openvino.tasks.audio.classifier import AudioClassifier


class OpenVINOAudioClassifier(AudioClassifier):
    """The handler class that TorchServe loads."""
