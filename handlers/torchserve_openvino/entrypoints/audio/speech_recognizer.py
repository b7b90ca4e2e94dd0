"""Recognizes speech: a WAV or FLAC file in, its text out."""

from torchserve_openvino.tasks.audio.recognizer import SpeechRecognizer


class OpenVINOSpeechRecognizer(SpeechRecognizer):
    """The handler class that TorchServe loads."""
