"""The architectures of the test suite: those that differ in mechanism."""

HEADS = (128, 64)
# Decoders with rotary and learned positions, encoders, local attention, encoder and decoder, experts, state spaces,
# patches, shifted windows, convolutions, samples and spectra.
NAMES = (
    "llama", "gpt2", "bert", "modernbert", "t5", "mixtral", "mamba", "vit", "swin", "convnext", "wav2vec2", "whisper",
    "gemma3_text", "deberta-v2",
)  # fmt: skip
